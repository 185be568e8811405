"""Converts blocks between pages of all layers and pages of one table each (tables.py).

Knows nothing of frames, leases or tokens, or of which blocks are sent. The layers of a table lie side by side in a
page of all layers, so that a block's page in it is a range of each of its runs:

    run of all layers     [layers with a window: 0 … 4 | 5 … 9 | 10, 11] [layers that see all: 5]
    tables' pages          table 1 <- 0 … 4    table 2 <- 5 … 9    table 3 <- 10, 11, zeros    table 0 <- all five
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from baton.kv.layout.bridge import Bridge, run_of, runs_of, wire_bytes
from baton.kv.layout.page import group_bytes, group_offsets
from baton.kv.layout.tables import alike
from baton.protos.nouns import KvLayout


class TableBridge:
    """Converts pages of layout ``sender`` to those of ``receiver``, of which just one has pages by window.

    ``unit`` is the size in bytes of a converted block. Raises LayoutMismatch naming the differences that can't be
    converted.
    """

    def __init__(self, sender: KvLayout, receiver: KvLayout) -> None:
        ours, theirs = alike(sender, receiver)
        self._bridge = Bridge(ours, theirs)  # between pages of all layers
        self.sender, self.receiver = sender, receiver
        self.unit = wire_bytes(receiver)
        self._ranges = ranges_of(ours, sender) if sender.windows else ranges_of(theirs, receiver)
        self._by_run = Bridge(run_of(ours), run_of(theirs))
        self._last: tuple[int, list[memoryview]] = -1, []  # a page's number, and its runs converted

    def part(self, page: memoryview, number: int, table: int) -> memoryview:
        """Returns the receiver's page, in its ``table``, of the block that is the sender's ``page``, whose number
        tells it from others.
        """
        at, size = self._ranges[table]
        parts = [run[at : at + size] for run in self._runs(page, number)]
        room = bytes(self.receiver.run_bytes - size)
        if len(parts) == 1 and not room:
            return parts[0]
        return memoryview(b"".join([piece for part in parts for piece in (part, room)]))

    def joined(self, pages: Sequence[memoryview]) -> memoryview:
        """Returns the receiver's block that is the sender's ``pages``, one of each table."""
        in_order = sorted(range(len(pages)), key=lambda table: self._ranges[table])
        tables = [runs_of(pages[table], self.sender) for table in in_order]
        sizes = [self._ranges[table][1] for table in in_order]
        runs = [list(map(_first_bytes, each, sizes)) for each in zip(*tables, strict=True)]
        if self._bridge.as_they_are:
            return memoryview(b"".join(chain.from_iterable(runs)))  # one copy
        return self._bridge.gather([memoryview(b"".join(run)) for run in runs])

    def _runs(self, page: memoryview, number: int) -> list[memoryview]:
        """Returns the runs of the sender's ``page`` as the receiver keeps them. A block's parts are asked for one
        after the other, so the last page's are kept.
        """
        if self._by_run.as_they_are:
            return runs_of(page, self.sender)
        if self._last[0] != number:
            self._last = number, [self._by_run.convert(run) for run in runs_of(page, self.sender)]
        return self._last[1]


def ranges_of(whole: KvLayout, divided: KvLayout) -> list[tuple[int, int]]:
    """Returns where the layers of each table of ``divided`` lie in a run of ``whole``, a page of all layers: first
    byte and bytes.
    """
    spans = {group.window: at for group, at in zip(whole.groups, group_offsets(whole), strict=True)}
    sizes = {group.window: group_bytes(whole.dtype, group) for group in whole.groups}
    most = divided.run_bytes
    found = list[tuple[int, int]]()
    for table, window in enumerate(divided.windows):
        before = max(0, table - 1) * most
        found.append((spans[window] + before, min(most, sizes[window] - before)))
    return found


def _first_bytes(run: memoryview, size: int) -> memoryview:
    return run[:size]
