"""Calls native paged_attention and rope_append directly, for tests and measurements; engines use the native step.

Knows nothing of models. A sequence is a tuple (pages, start, queries).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.abi.native import I32, I64, F, P, declare
from baton.kernels.paged_attention.stored import ELEMENTS, PAGE, SCALED
from baton.kernels.step.structs import ITEM, KV_TYPES, AttentionForm, PagedKv

Item = tuple[Sequence[int], int, int]


@dataclass(frozen=True)
class Pages:
    """The KV pages of one layer."""

    memory: Tensor  # (pages, page_bytes) uint8, of all layers
    dtype: str
    kv_heads: int
    head_dim: int
    layers: int = 1  # number of layers, all alike
    layer: int = 0  # index of the layer that is meant

    @property
    def struct(self) -> PagedKv:
        """Returns the pages as the struct PagedKv of kv.h."""
        size = self.memory.shape[1]
        at = self.layer * (size // self.layers)
        return PagedKv(self.memory.data_ptr(), size, at, KV_TYPES[self.dtype], self.kv_heads, self.head_dim)


def page_bytes(dtype: str, kv_heads: int, head_dim: int, layers: int = 1) -> int:
    """Returns the bytes of a page, including scales."""
    row = head_dim * ELEMENTS[dtype].itemsize + (4 if dtype in SCALED else 0)
    return 2 * layers * PAGE * kv_heads * row


def attend_form(
    library: ctypes.CDLL,
    q: Tensor,
    kv: Pages,
    items: Sequence[Item],
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention of q (rows, heads, head_dim) float32 with capped scores or sinks; returns a tensor of that
    shape.

    ``window`` is how many keys a row sees, 0 for all; ``softcap`` 0 for none; ``sinks`` (heads,) float32.
    """
    call = declare(library, "paged_attention_form", P, P, I32, I32, I32, F, P, P, I64, P, I64)
    table, kept = item_table(items)
    struct, out = kv.struct, torch.full_like(q, torch.nan)
    form = AttentionForm(softcap, None if sinks is None else sinks.data_ptr())
    call(ctypes.byref(struct), table.ctypes.data, len(items), q.shape[1], window, kv.head_dim**-0.5,
         ctypes.byref(form), q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0))  # fmt: skip
    del kept
    return out


def attend(library: ctypes.CDLL, q: Tensor, kv: Pages, items: Sequence[Item], window: int = 0) -> Tensor:
    """Computes attention of q (rows, heads, head_dim) float32, rows ordered by sequence; returns a tensor of that
    shape.

    ``window`` is how many keys a row sees, 0 for all.
    """
    out = torch.full_like(q, torch.nan)
    prepared(library, q, kv, items, out, window)()
    return out


def prepared(
    library: ctypes.CDLL, q: Tensor, kv: Pages, items: Sequence[Item], out: Tensor, window: int = 0
) -> Callable[[], None]:
    """Returns a function that computes ``attend`` into ``out`` with prepared arguments, for timing the call
    alone.
    """
    call = declare(library, "paged_attention", P, P, I32, I32, I32, F, P, I64, P, I64)
    table, kept = item_table(items)
    struct, scale = kv.struct, kv.head_dim**-0.5
    arguments = (
        *(ctypes.addressof(struct), table.ctypes.data, len(items), q.shape[1], window, scale),
        *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0)),
    )

    def run(alive: tuple[object, ...] = (struct, table, kept, q, out)) -> None:
        call(*arguments)

    return run


def append(
    library: ctypes.CDLL,
    qkv: Tensor,
    kv: Pages,
    items: Sequence[Item],
    rope_angles: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    rotated: int | None = None,
) -> None:
    """Rotates q and k of qkv (rows, heads + 2 kv_heads, head_dim) float32 in place, and stores k and v in the
    pages.

    ``rope_angles`` (positions, head_dim) are the cosines, then the sines of each position's angles; if only
    ``rotated`` dimensions are rotated, only as many columns are read. ``norms`` are the weights of q's and k's RMS
    norms.
    """
    table, kept = item_table(items)
    weights = (None, None) if norms is None else tuple(norm.data_ptr() for norm in norms)
    asked = ctypes.byref(kv.struct), table.ctypes.data, len(items), qkv.shape[1] - 2 * kv.kv_heads
    angles, rest = (rope_angles.data_ptr(), rope_angles.stride(0)), (*weights, eps, qkv.data_ptr())
    if rotated is None:
        declare(library, "rope_append", P, P, I32, I32, P, I64, P, P, F, P)(*asked, *angles, *rest)
    else:
        call = declare(library, "rope_append_part", P, P, I32, I32, P, I64, I32, P, P, F, P)
        call(*asked, *angles, rotated, *rest)
    del kept


def item_table(items: Sequence[Item]) -> tuple[NDArray[np.void], list[NDArray[np.int32]]]:
    """Returns the sequences as structs, and the block tables that they point to, which the caller must keep
    alive.
    """
    kept = [np.array(pages, np.int32) for pages, _, _ in items]
    found, first = np.empty(len(items), ITEM), 0
    for row, ((_, start, queries), pages) in enumerate(zip(items, kept, strict=True)):
        found[row] = (first, pages.ctypes.data, queries, start)
        first += queries
    return found, kept
