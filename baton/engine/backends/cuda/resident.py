"""Tracks which of the host's pages the device has as they are. Torch-free.

Knows nothing of devices or copies. The host's pages are what everybody else writes (handoffs, tiers) and reads, and
every step writes back what it appended. So a page's device copy is good for a sequence only as long as nothing but
the sequence itself, or a step that read the same bytes, can have touched either copy since. That is known of

    a sequence that was in the step before this one: its pages are those it had, as far as it had got
    one that was away for some steps: pages that nobody has touched on the device since it was last there
    one whose prompt came by a handoff onto this card (``landed``): those blocks, on the very table they came for

and everything else below its start is brought over again. Besides steps only handoffs write to the device, and only
to pages of a lease that was opened for them (``opened``). A sequence's number is its own for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.engine.plan import SequenceStep
from baton.protos.nouns import BLOCK_TOKENS

MOST_RECORDS = 8192  # sequences remembered; the oldest is forgotten first


@dataclass(slots=True)
class LastRun:
    """Records a sequence as it was when it last ran."""

    at: int
    table: Sequence[int]  # the very object: from one step to the next it only grows
    pages: list[int]  # what it had, whole or part, that holds tokens below ``end``
    end: int


@dataclass(slots=True)
class HandoffBlocks:
    """Records blocks of a sequence that has not run yet; they count while it has the very table."""

    table: Sequence[int]
    blocks: set[int] = field(default_factory=set)


class DeviceResidency:
    """Tracks ``pages`` pages; none of them is on the device yet."""

    def __init__(self, pages: int) -> None:
        self._touched = np.zeros(pages, np.int64)
        self._records: dict[int, LastRun] = {}
        self._landed: dict[int, HandoffBlocks] = {}
        self._now = self._ran = 0  # of everything that touches the device; of the last step

    def missing(self, items: Sequence[SequenceStep]) -> list[int]:
        """Returns the pages to bring over before a step of ``items``, in order, each once."""
        return sorted({page for item in items if item.start for page in self._missing(item)})

    def ran(self, items: Sequence[SequenceStep], brought: Sequence[int]) -> None:
        """Records that the step is done: ``brought`` came over, and each item wrote its tokens."""
        before_this = self._ran
        self._touch(brought)
        self._ran = self._now
        for item in items:
            end = item.start + len(item.tokens)
            self._touched[list(item.pages[item.start // BLOCK_TOKENS : _blocks(end)])] = self._now
            self._landed.pop(item.seq, None)
            before = self._records.pop(item.seq, None)  # the newest are last
            if before is not None and before.table is item.pages and before.at == before_this:
                before.pages += item.pages[len(before.pages) : _blocks(end)]
                before.at, before.end = self._now, end
                self._records[item.seq] = before
            else:
                self._records[item.seq] = LastRun(self._now, item.pages, list(item.pages[: _blocks(end)]), end)
        _drop_oldest(self._records)

    def opened(self, pages: Sequence[int]) -> None:
        """Records that a handoff may write ``pages`` until their lease ends: whatever others knew of them is
        void.
        """
        self._touch(pages)

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Records that a handoff brought ``blocks`` of ``seq`` to their pages of ``table``, on the device and on
        the host.
        """
        known = self._landed.get(seq)
        if known is None or known.table is not table:
            known = self._landed[seq] = HandoffBlocks(table)
            _drop_oldest(self._landed)
        known.blocks.update(blocks)
        self._touch([table[block] for block in blocks])

    def failed(self) -> None:
        """Records that nobody knows what a step wrote: nothing on the device counts any more."""
        self._records.clear()
        self._landed.clear()

    def _touch(self, pages: Sequence[int]) -> None:
        self._now += 1
        self._touched[list(pages)] = self._now

    def _missing(self, item: SequenceStep) -> Sequence[int]:
        record, blocks = self._records.get(item.seq), _blocks(item.start)
        if record is None or item.start > record.end:
            return self._not_landed(item, blocks)
        if record.at == self._ran and record.table is item.pages:
            return ()
        wanted = list(item.pages[:blocks])
        return [
            page
            for page, before in zip(wanted, record.pages, strict=False)
            if page != before or self._touched[page] > record.at
        ]

    def _not_landed(self, item: SequenceStep, blocks: int) -> Sequence[int]:
        known = self._landed.get(item.seq)
        if known is None or known.table is not item.pages:
            return item.pages[:blocks]
        return [item.pages[block] for block in range(blocks) if block not in known.blocks]


def _drop_oldest(records: dict[int, LastRun] | dict[int, HandoffBlocks]) -> None:
    while len(records) > MOST_RECORDS:
        del records[next(iter(records))]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
