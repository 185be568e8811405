"""Keeps the parts of an adapter as rows of one array, which a process maps without an object for each. Torch-free.

Knows nothing of matrices. An adapter beside experts has tens of thousands of parts; what goes through them between
two steps does so by whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.packed import PackedPart
from baton.engine.program.sites import Site

PART_ROW = np.dtype(
    [
        ("number", np.int32),
        ("rank", np.int32),
        *((name, np.int64) for name in ("first", "outputs", "inputs", "a", "b")),
        *((name, np.float64) for name in ("scale", "gain")),
        *((name, np.uint8) for name in ("looked_up", "narrow")),
    ],
    align=True,
)
Rows = NDArray[Any]  # of PART_ROW


class PartTable(Sequence[PackedPart]):
    """A sequence of parts over ``rows``, an array of PART_ROW in the order of sites and of their outputs."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @classmethod
    def of(cls, parts: Iterable[PackedPart]) -> PartTable:
        """Returns the table of ``parts``, which may come in any order."""
        return cls(in_order(np.array([_row(part) for part in parts], PART_ROW)))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> PackedPart: ...

    @overload
    def __getitem__(self, at: slice) -> PartTable: ...

    def __getitem__(self, at: int | slice) -> PackedPart | PartTable:
        return PartTable(self.rows[at]) if isinstance(at, slice) else _part(self.rows[at].item())

    def __iter__(self) -> Iterator[PackedPart]:
        return map(_part, self.rows.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartTable) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]


def rows_of(parts: Sequence[PackedPart]) -> Rows:
    """Returns ``parts`` as rows in the order of sites and of their outputs; a table's own rows are not copied."""
    return (parts if isinstance(parts, PartTable) else PartTable.of(parts)).rows


def in_order(rows: Rows) -> Rows:
    """Returns ``rows`` in the order of sites and of their outputs."""
    return rows[np.lexsort((rows["first"], rows["number"]))]


def moved(rows: Rows, by: int) -> Rows:
    """Returns a copy of ``rows`` whose matrices are ``by`` bytes further on."""
    found = rows.copy()
    found["a"] += by
    found["b"] += by
    return found


def _row(part: PackedPart) -> tuple[object, ...]:
    site = part.site
    return (
        site.number, part.rank, site.first, site.outputs, site.inputs, part.a, part.b, part.scale, site.gain,
        site.looked_up, part.narrow,
    )  # fmt: skip


def _part(row: tuple[Any, ...]) -> PackedPart:
    number, rank, first, outputs, inputs, a, b, scale, gain, looked_up, narrow = row
    site = Site(number, first, outputs, inputs, bool(looked_up), gain)
    return PackedPart(site, rank, scale, bool(narrow), a, b)
