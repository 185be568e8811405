"""Runs the last ops of a step for those rows alone whose results are read.

Knows nothing of who reads them. Once the last op that stores K, V, latents or recurrent state has run, later tokens
need nothing more of a prompt's rows, and only the last one chooses a token. In most models that leaves out one
layer's attention and MLP for the others. In models whose last layers read the K and V of earlier ones it is all of
these layers. A row's results don't depend on the rows beside it, so they have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.epilogues import names_of, read_by
from baton.engine.backends.native.program import NativeProgram
from baton.engine.program.ops import Op
from baton.kernels.step import structs
from baton.kernels.step.structs import ITEM

Ranges = tuple[tuple[int, int], ...]
RunOps = Callable[[structs.Step, int, int], object]  # runs ops from … to - 1 of a step


class LastRows:
    """Splits the stretches of ops ``whole``, each of one page table (``tables``, by op), after the last op that
    stores anything: ``first`` are those for all rows.
    """

    def __init__(self, native: NativeProgram, whole: Ranges, tables: Sequence[int]) -> None:
        self._native, self._tables = native, tables
        begin = len(native.program.divided[0])
        self.first = tuple((at, min(end, begin)) for at, end in whole if at < begin)
        self._rest = tuple((max(at, begin), end) for at, end in whole if end > begin)
        self._live = sorted({native.registers[name] for name in _read_first(native.ops[begin:], native.registers)})
        self._arena = torch.empty(0)

    def spares(self, batch: NativeBatch) -> bool:
        """Returns whether there are rows in ``batch`` that ``run`` leaves out."""
        return batch.rows > batch.wanted_count and not batch.pools and not batch.copies

    def run(self, step: structs.Step, batch: NativeBatch, arena: Tensor, run: RunOps) -> None:
        """Runs the ops that ``first`` lacks for the rows of ``batch`` whose results are read; ``arena`` has the
        registers of all rows.
        """
        rows = np.unique(batch.wanted)
        if not len(rows):
            return
        self._take(arena, batch.rows, rows)
        tokens = batch.tokens[rows]
        sampled = np.searchsorted(rows, batch.wanted).astype(np.int32)
        items = [np.array(list(_parts(each, rows)), ITEM) for each in batch.items_by_table]
        told = structs.Step.from_buffer_copy(step)
        told.rows, told.arena, told.tokens = len(rows), self._arena.data_ptr(), tokens.ctypes.data
        told.sampled, told.item_count = sampled.ctypes.data, len(items[0])
        for begin, end in self._rest:
            told.items = items[self._tables[begin]].ctypes.data
            run(told, begin, end)

    def _take(self, arena: Tensor, count: int, rows: NDArray[np.int32]) -> None:
        """Copies ``rows`` of the registers that are read later, of ``count`` rows in ``arena``, to an arena of
        their own.
        """
        widths, size = self._native.widths, len(rows) * self._native.row_floats
        if len(self._arena) < size:
            self._arena = torch.empty(size)
        index = torch.from_numpy(rows).long()
        for number in self._live:
            before, width = sum(self._native.widths[:number]), widths[number]
            source = arena[count * before :][: count * width].view(count, width)
            target = self._arena[len(rows) * before :][: len(rows) * width].view(len(rows), width)
            torch.index_select(source, 0, index, out=target)


def _parts(items: NDArray[np.void], rows: NDArray[np.int32]) -> Iterator[tuple[int, int, int, int]]:
    """Yields the parts of ``items`` that are in ``rows``, ascending, each of neighbouring rows: its first row's
    place in ``rows``, its block table, its number of rows, and its first position.
    """
    for first, pages, queries, start in items.tolist():
        begin, end = np.searchsorted(rows, (first, first + queries)).tolist()
        while begin < end:
            row, after = int(rows[begin]), begin + 1
            while after < end and rows[after] == row + after - begin:
                after += 1
            yield begin, pages, after - begin, start + row - first
            begin = after


def _read_first(ops: Sequence[Op], registers: dict[str, int]) -> set[str]:
    """Returns the registers that ``ops`` may read before they write them."""
    live, written = set[str](), set[str]()
    for op in ops:
        live |= read_by(op, registers) - written
        written |= names_of(op, ("out",), registers)
    return live
