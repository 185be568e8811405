"""Which of the host's pages the device has as they are. Torch-free.

Knows nothing of devices or copies. The host's pages are what everybody else writes (handoffs, tiers) and reads, and
every step writes back what it appended; so a page's device copy is good for a sequence only as long as nothing but
the sequence itself, or a step that read the same bytes, can have touched either copy since. That is known of

    a sequence that was in the step before this one: its pages are those it had, as far as it had got
    one that was away for some steps: pages that no step has touched since it was last there

and everything else below its start is brought over again. A sequence's number is its own for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.engine.plan import SequenceStep
from baton.protos.nouns import BLOCK_TOKENS

MOST_RECORDS = 8192


@dataclass(slots=True)
class Record:
    """A sequence as it was when it last ran."""

    step: int
    table: Sequence[int]  # the very object: from one step to the next it only grows
    pages: list[int]  # what it had, whole or part, that holds tokens below ``end``
    end: int


class Resident:
    """Of ``pages`` pages; none of them is on the device yet."""

    def __init__(self, pages: int) -> None:
        self._touched = np.zeros(pages, np.int64)
        self._records: dict[int, Record] = {}
        self._step = 0

    def missing(self, items: Sequence[SequenceStep]) -> list[int]:
        """The pages to bring over before a step of ``items``; in order, each once."""
        return sorted({page for item in items if item.start for page in self._missing(item)})

    def ran(self, items: Sequence[SequenceStep], brought: Sequence[int]) -> None:
        """The step is done: ``brought`` came over, and each item wrote its tokens."""
        self._step += 1
        self._touched[list(brought)] = self._step
        for item in items:
            end = item.start + len(item.tokens)
            self._touched[list(item.pages[item.start // BLOCK_TOKENS : _blocks(end)])] = self._step
            before = self._records.pop(item.seq, None)  # the newest are last
            if before is not None and before.table is item.pages and before.step == self._step - 1:
                before.pages += item.pages[len(before.pages) : _blocks(end)]
                before.step, before.end = self._step, end
                self._records[item.seq] = before
            else:
                self._records[item.seq] = Record(self._step, item.pages, list(item.pages[: _blocks(end)]), end)
        while len(self._records) > MOST_RECORDS:
            del self._records[next(iter(self._records))]

    def failed(self) -> None:
        """Nobody knows what the step wrote: nothing on the device counts any more."""
        self._records.clear()

    def _missing(self, item: SequenceStep) -> Sequence[int]:
        record, blocks = self._records.get(item.seq), _blocks(item.start)
        if record is None or item.start > record.end:
            return item.pages[:blocks]
        running = record.step == self._step
        if running and record.table is item.pages:
            return ()
        wanted = list(item.pages[:blocks])
        return [
            page
            for page, before in zip(wanted, record.pages, strict=False)
            if page != before or (not running and self._touched[page] > record.step)
        ]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
