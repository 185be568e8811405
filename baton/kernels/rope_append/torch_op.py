"""Defines torch.ops.baton.rope_append, which norms and rotates q and k in place and stores k and v in their pages.

Knows nothing of models. ``rope_angles`` (positions, head_dim) holds the cosines of each position's angles, then
their sines.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton.kernels.abi.native import I32, I64, F, P
from baton.kernels.abi.torch_library import address, define, require, runs_natively, symbol
from baton.kernels.paged_attention.native import Pages
from baton.kernels.paged_attention.stored import PAGE, write_layer
from baton.kernels.paged_attention.torch_op import ITEMS, PAGES, Sequences, paged, sequences
from baton.kernels.rms_norm.reference import normed
from baton.kernels.rope_append.reference import rotate

SCHEMA = (
    f"rope_append(Tensor(a!) qkv, Tensor(b!) memory, {ITEMS}, Tensor rope_angles, Tensor? q_norm, Tensor? k_norm, "
    f"float eps, {PAGES}) -> ()"
)
Norms = tuple[Tensor | None, Tensor | None]


def _fake(
    qkv: Tensor,
    memory: Tensor,
    table: Tensor,
    items: Tensor,
    rope_angles: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    dtype: str,
    kv_heads: int,
    *rest: object,
) -> None:
    require(
        qkv.dim() == 3 and qkv.shape[1] > 2 * kv_heads, "rope_append: qkv is (rows, heads + 2 kv_heads, head_dim)"
    )


@define(SCHEMA, _fake)
def rope_append(
    qkv: Tensor,
    memory: Tensor,
    table: Tensor,
    items: Tensor,
    rope_angles: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    dtype: str,
    kv_heads: int,
    layers: int,
    layer: int,
) -> None:
    """Norms and rotates q and k of qkv (rows, heads + 2 kv_heads, head_dim) in place, and stores k and v in the
    pages.

    Rows are at the positions that their sequences say. Raises ValueError for shapes that don't fit.
    """
    call = symbol("rope_append", P, P, I32, I32, P, I64, P, P, F, P)
    _fake(qkv, memory, table, items, rope_angles, q_norm, k_norm, eps, dtype, kv_heads)
    kv = paged(memory, qkv.shape[2], dtype, kv_heads, layers, layer)
    found = sequences(table, items, len(memory), len(qkv))
    reach = max((start + count for _, start, count in found.numbers), default=0)
    require(
        rope_angles.shape[0] >= reach and rope_angles.shape[1:] == qkv.shape[2:],
        f"rope_angles is ({reach} or more, head_dim)",
    )
    require((q_norm is None) == (k_norm is None), "rope_append takes both norms or none")
    wide = all(w is None or w.shape == qkv.shape[2:] for w in (q_norm, k_norm))
    require(wide, "rope_append: a norm is (head_dim,)")
    native = runs_natively(qkv, rope_angles, q_norm, k_norm) and qkv.is_contiguous() and memory.is_contiguous()
    if call is None or not native:
        return _by_reference(qkv, kv, found, rope_angles, (q_norm, k_norm), eps)
    angles, norms = rope_angles.contiguous(), [None if w is None else w.contiguous() for w in (q_norm, k_norm)]
    struct = kv.struct
    call(ctypes.addressof(struct), found.structs.ctypes.data, len(found.numbers), qkv.shape[1] - 2 * kv_heads,
         angles.data_ptr(), angles.stride(0), *map(address, norms), eps, qkv.data_ptr())  # fmt: skip
    return None


def _by_reference(qkv: Tensor, kv: Pages, found: Sequences, rope_angles: Tensor, norms: Norms, eps: float) -> None:
    runs = [torch.arange(start, start + count) for _, start, count in found.numbers]
    if not runs:
        return
    positions, heads = torch.cat(runs), qkv.shape[1] - 2 * kv.kv_heads
    pages = torch.cat([found.pages(at)[run // PAGE] for at, run in enumerate(runs)])
    half = rope_angles[positions].unflatten(1, (2, -1))
    cos, sin = torch.cat((half[:, 0], half[:, 0]), -1), torch.cat((-half[:, 1], half[:, 1]), -1)
    q, k, v = qkv.split((heads, kv.kv_heads, kv.kv_heads), 1)
    if norms[0] is not None and norms[1] is not None:
        q.copy_(normed(q, norms[0], eps))
        k.copy_(normed(k, norms[1], eps))
    for part in (q, k):
        part.copy_(rotate(part, cos[:, None], sin[:, None]))
    write_layer(kv.memory, (pages, positions % PAGE), kv.layer, kv.layers, (k.float(), v.float()), kv.dtype)
