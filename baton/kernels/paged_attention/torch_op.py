"""Defines torch.ops.baton.paged_attention, and how pages and sequences are passed to all torch ops over pages.

Knows nothing of models. Pages are ``PAGES`` in a schema: memory (pages, page_bytes) uint8 of ``layers`` equal
layers, of which ``layer`` is meant. Sequences are ``ITEMS``: ``table`` (n,) holds the page numbers of all
sequences, one after the other; ``items`` (sequences, 3): where its pages begin in ``table``, its first query's
position, its number of queries. Rows of q are ordered by sequence.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.abi.native import I32, I64, F, P
from baton.kernels.abi.torch_library import define, require, runs_natively, symbol
from baton.kernels.paged_attention.native import Pages, page_bytes
from baton.kernels.paged_attention.stored import ELEMENTS, PAGE, attend_stored, read_layer
from baton.kernels.step.structs import ITEM

ITEMS = "Tensor table, Tensor items"
PAGES = "str dtype, int kv_heads, int layers, int layer"


class Sequences(NamedTuple):
    """The sequences of one call, from ITEMS: ``numbers`` (as in ``items``), and structs that point into ``table``,
    int32.
    """

    numbers: list[list[int]]
    structs: NDArray[np.void]
    table: Tensor

    def pages(self, at: int) -> Tensor:
        """Returns the page numbers that sequence ``at`` has after the step."""
        offset, start, count = self.numbers[at]
        return self.table[offset : offset - (-(start + count) // PAGE)]


def sequences(table: Tensor, items: Tensor, pages: int, rows: int) -> Sequences:
    """Returns the sequences that ITEMS describe. Raises ValueError for a page number of ``pages`` or more, a table
    that is too short, or a number of queries other than ``rows``.
    """
    numbers, whole = items.tolist(), table.to(torch.int32).contiguous()
    require(sum(count for *_, count in numbers) == rows, f"items: their queries are {rows} rows")
    bad = any(at < 0 or start < 0 or n < 1 or at - (-(start + n) // PAGE) > len(whole) for at, start, n in numbers)
    require(not bad, "items: a sequence has queries from position 0 on, and a page per 16 tokens")
    inside = not len(whole) or (int(whole.min()) >= 0 and int(whole.max()) < pages)
    require(inside, f"table: pages are 0 to {pages - 1}")
    structs, first = np.zeros(len(numbers), ITEM), 0
    for struct, (at, start, count) in zip(structs, numbers, strict=True):
        struct["first"], struct["pages"] = first, whole.data_ptr() + 4 * at
        struct["queries"], struct["start"] = count, start
        first += count
    return Sequences(numbers, structs, whole)


def paged(memory: Tensor, head_dim: int, dtype: str, kv_heads: int, layers: int, layer: int) -> Pages:
    """Returns the pages that the arguments PAGES describe. Raises ValueError if the memory doesn't fit them."""
    require(dtype in ELEMENTS, f"dtype is one of {', '.join(ELEMENTS)}")
    require(kv_heads > 0 and layers > 0, "there are 1 or more kv_heads and layers")
    size = page_bytes(dtype, kv_heads, head_dim, layers)
    fits = memory.dim() == 2 and memory.shape[1] == size and memory.dtype == torch.uint8
    require(fits and 0 <= layer < layers, f"memory is (pages, {size}) uint8 of layers 0 to {layers - 1}")
    return Pages(memory, dtype, kv_heads, head_dim, layers, layer)


def stored(kv: Pages, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Returns K and V of ``pages`` as float32, (16 n, kv_heads, head_dim) each."""
    return read_layer(kv.memory, pages, kv.layer, kv.layers, kv.kv_heads, kv.head_dim, kv.dtype)


def by_reference(q: Tensor, kv: Pages, found: Sequences, window: int, scale: float) -> Tensor:
    """Returns the attention outputs of all sequences, computed by the reference."""
    parts, first = [q[:0]], 0
    for at, (_, start, count) in enumerate(found.numbers):
        rows = q[first : first + count].float()
        parts.append(attend_stored(rows, stored(kv, found.pages(at)), (start, count), window, scale))
        first += count
    return torch.cat(parts)


def queries(q: Tensor) -> Tensor:
    """Returns q with contiguous heads in each row, copied if needed; rows may be apart, as in qkv."""
    return q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()


def require_queries(q: Tensor, kv_heads: int) -> None:
    """Raises ValueError unless q is (rows, heads, head_dim) with heads a multiple of ``kv_heads``."""
    grouped = q.dim() == 3 and kv_heads > 0 and q.shape[1] % kv_heads == 0
    require(grouped, "q is (rows, heads, head_dim), heads a multiple of kv_heads")


def _fake(
    q: Tensor, memory: Tensor, table: Tensor, items: Tensor, dtype: str, kv_heads: int, *rest: object
) -> Tensor:
    require_queries(q, kv_heads)
    return q.new_empty(q.shape)


@define(f"paged_attention(Tensor q, Tensor memory, {ITEMS}, {PAGES}, int window, float scale) -> Tensor", _fake)
def paged_attention(
    q: Tensor,
    memory: Tensor,
    table: Tensor,
    items: Tensor,
    dtype: str,
    kv_heads: int,
    layers: int,
    layer: int,
    window: int,
    scale: float,
) -> Tensor:
    """Returns attention outputs in the shape of q (rows, heads, head_dim); a row sees the keys up to its own
    position.

    ``window`` limits a row to its last keys, 0 for all. Raises ValueError for arguments that don't fit.
    """
    require(window >= 0, "window is 0 or more")
    call, out = (
        symbol("paged_attention", P, P, I32, I32, I32, F, P, I64, P, I64),
        _fake(q, memory, table, items, dtype, kv_heads),
    )
    kv = paged(memory, q.shape[2], dtype, kv_heads, layers, layer)
    found = sequences(table, items, len(memory), len(q))
    if call is None or not runs_natively(q) or not memory.is_contiguous():
        return out.copy_(by_reference(q, kv, found, window, scale))
    rows = queries(q)
    call(ctypes.addressof(struct := kv.struct), found.structs.ctypes.data, len(found.numbers), q.shape[1], window,
         scale, rows.data_ptr(), rows.stride(0), out.data_ptr(), out.stride(0))  # fmt: skip
    del struct
    return out
