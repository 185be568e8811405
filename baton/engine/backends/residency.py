"""Tracks which of the host's pages have a current copy on a device: a GPU, or other hosts' ranks. Torch-free.

Knows nothing of devices or copies. Others (handoffs, tiers) read and write the host's pages, and every step writes
back what it appended. So a page's device copy is valid for a sequence only while nothing but the sequence itself,
or a step that read the same bytes, can have written either copy since. That is known of

    a sequence that was in the previous step: the pages that it had then
    one that skipped some steps: pages that nobody has written on the device since it last ran
    one whose prompt came by a handoff to this GPU (``landed``): those blocks, in the same table object

and every other page before its start is copied again. Besides steps only handoffs write to the device, and only to
pages of a lease that was opened for them (``opened``). A sequence's number is never reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.engine.plan import SequenceStep
from baton.protos.nouns import BLOCK_TOKENS

MOST_RECORDS = 8192  # sequences remembered; the oldest is forgotten first


@dataclass(slots=True)
class LastRun:
    """The state of a sequence when it last ran."""

    at: int  # value of the clock of writes (``PageResidency``)
    table: Sequence[int]  # the same object as the sequence's: from one step to the next it only grows
    pages: list[int]  # its pages with tokens before position ``end``, full or not
    end: int


@dataclass(slots=True)
class HandoffBlocks:
    """Blocks that a handoff wrote for a sequence that has not run yet; valid while it has the same ``table``
    object.
    """

    table: Sequence[int]
    blocks: set[int] = field(default_factory=set)


class PageResidency:
    """Tracks which of ``pages`` pages are current on the device; at first none is."""

    def __init__(self, pages: int) -> None:
        self._touched = np.zeros(pages, np.int64)
        self._records: dict[int, LastRun] = {}
        self._landed: dict[int, HandoffBlocks] = {}
        self._now = self._ran = 0  # of everything that touches the device; of the last step

    def missing(self, items: Sequence[SequenceStep]) -> list[int]:
        """Returns the pages that must be copied to the device before a step of ``items``, ascending, without
        duplicates.
        """
        return sorted({page for item in items if item.start for page in self._missing(item)})

    def ran(self, items: Sequence[SequenceStep], brought: Sequence[int]) -> None:
        """Records that the step of ``items`` is done, before which the pages ``brought`` were copied to the
        device.
        """
        before_this = self._ran
        self._touch(brought)
        self._ran = self._now
        for item in items:
            end = item.start + len(item.tokens)
            self._touched[list(item.pages[item.start // BLOCK_TOKENS : _blocks(end)])] = self._now
            for draft_branch in item.draft_branches:
                self._touched[list(draft_branch.pages)] = self._now
            self._landed.pop(item.seq, None)
            before = self._records.pop(item.seq, None)  # the newest are last
            if before is not None and before.table is item.pages and before.at == before_this:
                before.pages += item.pages[len(before.pages) : _blocks(end)]
                before.at, before.end = self._now, end
                self._records[item.seq] = before
            else:
                self._records[item.seq] = LastRun(self._now, item.pages, list(item.pages[: _blocks(end)]), end)
        _drop_oldest(self._records)

    def ended(self) -> None:
        """Does nothing, because the host keeps every page."""

    def opened(self, pages: Sequence[int]) -> None:
        """Records that a handoff may write ``pages`` until their lease ends, so that other sequences' copies become
        invalid.
        """
        self._touch(pages)

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Records that a handoff wrote the blocks of sequence ``seq`` with indices ``blocks`` to their pages of
        ``table``, on the device and the host.
        """
        known = self._landed.get(seq)
        if known is None or known.table is not table:
            known = self._landed[seq] = HandoffBlocks(table)
            _drop_oldest(self._landed)
        known.blocks.update(blocks)
        self._touch([table[block] for block in blocks])

    def failed(self) -> None:
        """Records that a step failed after unknown writes: no page on the device is current any more."""
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


def missing_of(tables: Sequence[PageResidency], items: Sequence[SequenceStep]) -> list[int]:
    """Returns the pages that must be copied before a step of ``items``, whose page tables have one of ``tables``
    each, as ``PageResidency.missing``.
    """
    found = [current.missing(_in_table(items, number)) for number, current in enumerate(tables)]
    return sorted({page for pages in found for page in pages})


def ran(tables: Sequence[PageResidency], items: Sequence[SequenceStep], brought: Sequence[int]) -> None:
    """Records a step in all of ``tables``, as ``PageResidency.ran``. What it wrote by one table is news to the
    others, because a page may belong to another table when it is leased again.
    """
    if len(tables) > 1:
        tabled = [item for number in range(len(tables)) for item in _in_table(items, number)]
        ends = [_blocks(item.start + len(item.tokens)) for item in tabled]
        spans = [item.pages[item.start // BLOCK_TOKENS : end] for item, end in zip(tabled, ends, strict=True)]
        brought = sorted({*brought, *(page for pages in spans for page in pages)})
    for number, current in enumerate(tables):
        current.ran(_in_table(items, number), brought)


def _in_table(items: Sequence[SequenceStep], table: int) -> Sequence[SequenceStep]:
    """Returns the items with the pages of their page table ``table`` as their first one."""
    if not table:
        return items
    return [msgspec.structs.replace(item, pages=item.tables[table - 1]) for item in items]
