"""Finds those parts of an adapter that apply to one rank's share of a model, by whole columns.

Knows nothing of where adapters come from. A part whose outputs are divided is cut at panels of its second matrix,
which lie one after the other, so that what is left of it stays where it is. Only where a rank's outputs begin
inside a panel are its panels made anew.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.packed import Array, PackedPart
from baton.engine.adapters.part_table import PART_ROW, PartTable, Rows, in_order
from baton.engine.backends.native.adapter_structs import address_of
from baton.engine.program.program import Program
from baton.engine.program.rank_program import RankProgram
from baton.engine.program.shares import Widths
from baton.engine.program.sites import Site, sites_of
from baton.kernels.lora.structs import PANEL, panelled

ABSENT, WHOLE, CUT, EXPERT = range(4)  # what a rank has of the outputs at a site: none, all, some, some experts'
ALIGN = 64  # bytes, to a multiple of which each matrix is aligned


class OwnRows(NamedTuple):
    """The parts of an adapter that a rank has: ``rows`` in the order of sites, whose places count from the first
    byte of the adapter's memory, and the memory of panels that were made anew.
    """

    rows: Rows
    made: memoryview | None


class OwnParts:
    """Finds the parts of adapters for the rank whose share of the program is ``own``."""

    def __init__(self, own: RankProgram) -> None:
        self.sites = max(own.sites, default=-1) + 1
        ranges = {number: own.rows.get(name) for number, name in own.sites.items()}
        most = max((len(found) for found in ranges.values() if found), default=0)
        self._kinds = np.zeros(self.sites, np.uint8)
        self._ranges = np.zeros((most, 3, self.sites), np.int64)  # begin, end, first own output
        for number, found in ranges.items():
            experts = number > own.head_site
            whole = found is None or (experts and own.rank.spare)
            self._kinds[number] = WHOLE if whole else EXPERT if experts else CUT
            local = 0
            for at, (begin, end) in zip(self._ranges, found or (), strict=False):
                at[:, number] = begin, end, local
                local += end - begin

    def copies(self, sites: Iterable[Site]) -> bool:
        """Returns whether the rank makes panels anew of an adapter beside all of ``sites``."""
        table = np.array(
            [(site.number, site.first, site.outputs) for site in sites if not site.looked_up], np.int64
        )
        known = table[table[:, 0] < self.sites]
        number, first, outputs = known[self._kinds[known[:, 0]] == CUT].T
        for begins, ends, _ in self._ranges:
            low, high = np.maximum(begins[number], first), np.minimum(ends[number], first + outputs)
            if ((low < high) & ((low - first) % PANEL > 0)).any():
                return True
        return False

    def of(self, rows: Rows, memory: memoryview) -> OwnRows:
        """Returns those of ``rows`` that the rank has, cut to its outputs; their matrices are in ``memory``."""
        rows = rows[rows["number"] < self.sites]
        kinds = np.where(
            rows["looked_up"] & (self._kinds[rows["number"]] != ABSENT), WHOLE, self._kinds[rows["number"]]
        )
        pieces = [rows[kinds == WHOLE], *self._experts(rows[kinds == EXPERT])]
        shifts = [np.zeros(sum(map(len, pieces)), np.int64)]
        for ranges in self._ranges:
            piece, shift = _cut(rows[kinds == CUT], *ranges)
            pieces.append(piece)
            shifts.append(shift)
        found = np.concatenate(pieces, dtype=PART_ROW)
        made = _made(found, np.concatenate(shifts), memory)
        return OwnRows(in_order(found), made)

    def _experts(self, rows: Rows) -> list[Rows]:
        """Returns those of the rows, which are beside experts, whose expert is the rank's."""
        begin, end, _ = self._ranges[0][:, rows["number"]] if len(rows) else np.zeros((3, 0), np.int64)
        return [rows[(begin <= rows["first"]) & (rows["first"] < end)]]


def any_copies(program: Program, widths: Widths) -> bool:
    """Returns whether any rank makes panels anew of an adapter of all that can be adapted in ``program``."""
    sites = tuple(sites_of(program).values())
    return any(OwnParts(widths.share(program, index)).copies(sites) for index in range(widths.count))


def _cut(
    rows: Rows, begins: NDArray[np.int64], ends: NDArray[np.int64], local: NDArray[np.int64]
) -> tuple[Rows, NDArray[np.int64]]:
    """Returns what ``rows`` have of one range of outputs of each site, by site's number ``begins`` … ``ends`` - 1,
    which are the rank's from ``local`` on; and how many outputs before it the first panel of each has.
    """
    at, first = rows["number"], rows["first"]
    low, high = np.maximum(begins[at], first), np.minimum(ends[at], first + rows["outputs"])
    kept = low < high
    found, skipped = rows[kept], (low - first)[kept]
    found["first"], found["outputs"] = (local[at] + low - begins[at])[kept], (high - low)[kept]
    found["b"] += skipped // PANEL * PANEL * found["rank"] * _width(found)
    return found, skipped % PANEL


def _width(rows: Rows) -> NDArray[np.int64]:
    """Returns the bytes of an element of each part's matrices."""
    return np.where(rows["narrow"], 2, 4)


def _made(rows: Rows, shifts: NDArray[np.int64], memory: memoryview) -> memoryview | None:
    """Makes panels of those ``rows`` whose first output is ``shifts`` outputs behind the begin of a panel, and has
    the rows refer to them. Returns the panels' memory; None if there are none.
    """
    wanted = np.flatnonzero(shifts)
    if not len(wanted):
        return None
    counts = -(-rows["outputs"] // PANEL)
    sizes = -(-(counts * PANEL * rows["rank"] * _width(rows))[wanted] // ALIGN) * ALIGN
    room = memoryview(mmap.mmap(-1, int(sizes.sum())))
    apart = address_of(room) - address_of(memory)
    for at, end, size in zip(wanted, np.cumsum(sizes), sizes, strict=True):
        part, shift, count = PartTable(rows)[int(at)], int(shifts[at]), int(counts[at])
        there = panelled(shift + part.site.outputs) // PANEL
        source, panels = _panels(memory, part, part.b, there), _panels(room, part, int(end - size), count)
        panels[:, :, : PANEL - shift] = source[:count, :, shift:]
        panels[: there - 1, :, PANEL - shift :] = source[1:, :, :shift]
        rows["b"][at] = apart + end - size
    return room


def _panels(memory: memoryview, part: PackedPart, at: int, count: int) -> Array:
    return np.frombuffer(memory, part.dtype, count * part.rank * PANEL, at).reshape(count, part.rank, PANEL)
