"""Orders of inputs (GPTQ's act-order) of a packed weight, whose rows may have several.

A table of orders is int32: (k,) where all rows have one, else (orders, k), each of equally many rows; those that
fill the last panel count. Knows nothing of what rows hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def stacked(orders: Sequence[Tensor | None], rows: Sequence[int], k: int, panel: int) -> Tensor | None:
    """Returns the table of weights that lie one after the other, ``rows`` of each, in panels of ``panel`` rows.

    An order is (k,), or None for inputs as they come. Returns None if all are.
    """
    if all(order is None for order in orders):
        return None
    plain = torch.arange(k, dtype=torch.int32)
    known = [plain if order is None else order for order in orders]
    if all(torch.equal(order, known[0]) for order in known):
        return known[0].contiguous()
    runs = [*rows[:-1], rows[-1] + -sum(rows) % panel]
    each = math.gcd(*runs)
    return torch.stack(known).repeat_interleave(torch.tensor(runs) // each, 0)


def beside(tables: Sequence[Tensor], k: int) -> Tensor:
    """Returns the table of weights of equally many rows, one after the other. Each keeps orders of its own, as many
    as the others.
    """
    counts = [table.numel() // k for table in tables]
    most = math.lcm(*counts)
    each = (table.view(count, k) for table, count in zip(tables, counts, strict=True))
    return torch.cat([own.repeat_interleave(most // len(own), 0) for own in each])


def of_rows(table: Tensor, total: int, rows: Tensor) -> Tensor:
    """Returns the table of ``rows``, numbers of rows of a weight that has ``total`` and this table."""
    if table.dim() == 1:
        return table
    runs = rows // (total // len(table))
    each = math.gcd(*runs.unique_consecutive(return_counts=True)[1].tolist())
    return table[runs[::each]].contiguous()


def pointers(found: Tensor, each: int, mins: Tensor | None, panel: int) -> Tensor:
    """Returns ``found`` (orders, k) of ``each`` rows as native code takes them, int64, a row mirroring an Order of
    order.h. It has one per panel, or one per order where orders aren't of whole panels.
    """
    step = each if each % panel else panel
    rows = torch.arange(0, len(found) * each, step)
    inputs = found.data_ptr() + rows // each * found.stride(0) * found.element_size()
    lows = torch.zeros_like(rows)
    if mins is not None:
        lows = mins.data_ptr() + rows // panel * mins.stride(0) * mins.element_size()
    return torch.stack((lows, inputs, torch.full_like(rows, step)), 1)
