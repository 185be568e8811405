"""Defines torch.ops.baton.cascade_attention: paged attention for groups of sequences that share their first pages.

Knows nothing of models. ``groups`` (n, 3) holds the first sequence, the number of sequences and the shared keys
(``native.groups_of``).
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

from baton.kernels.abi.native import I32, I64, F, P
from baton.kernels.abi.torch_library import define, require, runs_natively, symbol
from baton.kernels.paged_attention.stored import PAGE
from baton.kernels.paged_attention.torch_op import (
    ITEMS,
    PAGES,
    Sequences,
    by_reference,
    paged,
    queries,
    require_queries,
    sequences,
)


def _fake(
    q: Tensor,
    memory: Tensor,
    table: Tensor,
    items: Tensor,
    groups: Tensor,
    dtype: str,
    kv_heads: int,
    *rest: object,
) -> Tensor:
    require_queries(q, kv_heads)
    return q.new_empty(q.shape)


@define(
    f"cascade_attention(Tensor q, Tensor memory, {ITEMS}, Tensor groups, {PAGES}, float scale) -> Tensor", _fake
)
def cascade_attention(
    q: Tensor,
    memory: Tensor,
    table: Tensor,
    items: Tensor,
    groups: Tensor,
    dtype: str,
    kv_heads: int,
    layers: int,
    layer: int,
    scale: float,
) -> Tensor:
    """Returns what paged_attention does without a window, computing shared prefixes once per group.

    Raises ValueError if the sequences of a group don't share the keys that it claims.
    """
    call = symbol("cascade_attention", P, P, I32, P, I32, I32, F, P, I64, I64, P, I64)
    out = _fake(q, memory, table, items, groups, dtype, kv_heads)
    kv = paged(memory, q.shape[2], dtype, kv_heads, layers, layer)
    found = sequences(table, items, len(memory), len(q))
    require(groups.dim() == 2 and groups.shape[1] == 3, "groups are (n, 3)")
    for group in groups.tolist():
        _require_shared(found, *group)
    spans = sorted((first, first + count) for first, count, _ in groups.tolist())
    require(all(a[1] <= b[0] for a, b in pairwise(spans)), "groups: a sequence is in one of them at most")
    if call is None or not runs_natively(q) or not memory.is_contiguous():
        return out.copy_(by_reference(q, kv, found, 0, scale))
    rows, shared = queries(q), groups.to(torch.int32).contiguous()
    struct = kv.struct
    call(ctypes.addressof(struct), found.structs.ctypes.data, len(found.numbers), shared.data_ptr(), len(shared),
         q.shape[1], scale, rows.data_ptr(), rows.stride(0), len(q), out.data_ptr(), out.stride(0))  # fmt: skip
    return out


def _require_shared(found: Sequences, first: int, count: int, keys: int) -> None:
    members, pages = range(first, first + count), keys // PAGE
    inside = first >= 0 and count > 0 and members.stop <= len(found.numbers) and keys >= 0 and keys % PAGE == 0
    require(inside, "groups: each names sequences that are there and whole pages")
    reach = min(found.numbers[at][1] + 1 for at in members)
    alike = all(torch.equal(found.pages(at)[:pages], found.pages(first)[:pages]) for at in members)
    require(keys <= reach and alike, "groups: a group's sequences begin with the same pages, which all queries see")
