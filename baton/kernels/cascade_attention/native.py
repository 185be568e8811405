"""Calls native cascade_attention directly, for tests and measurements, and finds groups of sequences with shared
pages.

Knows nothing of models or schedulers. A sequence is a tuple (pages, start, queries), a group (first sequence,
count, keys).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi.native import I32, I64, F, P, declare
from baton.kernels.paged_attention.native import Item, Pages, item_table
from baton.kernels.paged_attention.stored import PAGE

Group = tuple[int, int, int]
GROUP = np.dtype([("first", np.int32), ("count", np.int32), ("keys", np.int32)])


def groups_of(items: Sequence[Item], least: int = 512) -> list[Group]:
    """Returns the runs of neighbouring sequences whose block tables begin with the same pages, as groups.

    The shared keys must be ``least`` or more, and visible to all queries of the group.
    """
    found: list[Group] = []
    first = 0
    while first < len(items):
        count, keys = 1, _shareable(items[first])
        while first + count < len(items):
            both = min(keys, _shareable(items[first + count]), _common(items[first][0], items[first + count][0]))
            if both < least:
                break
            count, keys = count + 1, both
        if count > 1:
            found.append((first, count, keys))
        first += count
    return found


def cascade(
    library: ctypes.CDLL,
    q: Tensor,
    kv: Pages,
    items: Sequence[Item],
    groups: Sequence[Group],
    out: Tensor | None = None,
) -> Tensor:
    """Computes attention of q (rows, heads, head_dim) float32 with a library's function; returns a tensor of q's
    shape.

    Rows are ordered by sequence. The result is written to ``out`` if given.
    """
    call = declare(library, "cascade_attention", P, P, I32, P, I32, I32, F, P, I64, I64, P, I64)
    table, kept = item_table(items)
    shared, struct = np.array(groups, GROUP), kv.struct
    out = torch.full_like(q, torch.nan) if out is None else out
    call(ctypes.byref(struct), table.ctypes.data, len(items), shared.ctypes.data, len(groups), q.shape[1],
         kv.head_dim**-0.5, q.data_ptr(), q.stride(0), len(q), out.data_ptr(), out.stride(0))  # fmt: skip
    del kept
    return out


def _shareable(item: Item) -> int:
    """Returns the number of keys in whole pages that the first query of the sequence sees."""
    return (item[1] + 1) // PAGE * PAGE


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pages = 0
    while pages < min(len(a), len(b)) and a[pages] == b[pages]:
        pages += 1
    return pages * PAGE
