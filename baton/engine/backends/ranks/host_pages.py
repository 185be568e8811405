"""Tracks which KV pages other hosts of a worker's ranks have as they must be, and which of these are only there.

Knows nothing of connections: ``show`` copies parts of the lead's pages to a host, ``bring`` has hosts copy theirs
back. Others read and write the lead's pages, and what they wrote is shown to the hosts whose ranks read it. A
handoff may bring each host its own part of a page. Such a page is *divided* until it is leased anew: what a host
got, and what its ranks wrote since, is newer there than in the lead's page, which it must never overwrite. Whoever
but ranks wants to read such a page has it made whole. Pages of recurrent state are divided for a handoff alone: the
lead has them made whole before the first step that reads them, and lends other hosts their parts to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.backends.residency import PageResidency, missing_of, ran
from baton.engine.plan import SequenceStep
from baton.kv.layout.extents import Part, without
from baton.protos.measurements import SharedPages
from baton.protos.nouns import BLOCK_TOKENS

AT_ONCE = 64  # pages that hosts are asked for by one note

Show = Callable[[int, Sequence[int], Part], None]
Bring = Callable[[Sequence[int], tuple[Part, ...]], None]


def parts_missed(parts: Sequence[Part], page_bytes: int) -> tuple[Part, ...]:
    """Returns the part of each page that each host has of a divided one and no host before it: () of the lead's.

    ``parts`` are what the ranks of each host read, the lead's first.
    """
    return ((), *(without(part, tuple(parts[:host]), page_bytes) for host, part in enumerate(parts) if host))


class HostPages:
    """Implements ``Mirror`` for the pages of several hosts, whose ranks read ``parts`` of each, the lead's first.

    There are ``tables`` page tables and ``pages`` pages of ``page_bytes``.
    """

    shared: SharedPages | None = None

    def __init__(
        self, parts: Sequence[Part], pages: int, page_bytes: int, tables: int, show: Show, bring: Bring
    ) -> None:
        self._parts, self._missed = parts, parts_missed(parts, page_bytes)
        self._current = [PageResidency(pages) for _ in range(tables)]
        self._divided: set[int] = set()
        self._brought: set[int] = set()  # divided pages that the lead has whole, because no step wrote them since
        self._show, self._bring = show, bring

    def show(self, items: Sequence[SequenceStep]) -> list[int]:
        """Copies what others may have written to each host before a step of ``items``; returns the pages."""
        missing = [page for page in missing_of(self._current, items) if page not in self._divided]
        for host, part in enumerate(self._parts[1:], 1):
            self._show(host, missing, part)
        return missing

    def ran(self, items: Sequence[SequenceStep], shown: Sequence[int]) -> None:
        """Records that the step of ``items`` is done, before which ``shown`` were copied."""
        ran(self._current, items, shown)
        for item in items if self._brought else ():
            end = -(-(item.start + len(item.tokens)) // BLOCK_TOKENS)
            for pages in (item.pages, *item.tables):
                self._brought.difference_update(pages[item.start // BLOCK_TOKENS : end])
            for draft_branch in item.draft_branches:
                self._brought.difference_update(draft_branch.pages)

    # ---- Mirror ----

    def opened(self, pages: Sequence[int]) -> None:
        """Records that a handoff may write ``pages`` from now on."""
        self._current[0].opened(pages)
        self._brought.difference_update(pages)

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Records that each host has got its part of the blocks of sequence ``seq`` with indices ``blocks``."""
        self._current[0].landed(seq, table, blocks)
        if any(self._missed) or len(self._current) > 1:  # a table alone doesn't know the blocks of others
            landed = [table[block] for block in blocks]
            self._divided.update(landed)
            self._brought.difference_update(landed)

    def taken(self, pages: Sequence[int]) -> None:
        """Records that ``pages`` were leased anew: what was in them counts no more."""
        self._divided.difference_update(pages)
        self._brought.difference_update(pages)

    def make_whole(self, pages: Sequence[int]) -> None:
        """Has the other hosts copy what only they have of ``pages`` to the lead's pages, once until a step writes
        them. Raises RankLost and Unavailable.
        """
        wanted = sorted(self._divided.intersection(pages) - self._brought)
        for first in range(0, len(wanted), AT_ONCE) if any(self._missed) else ():
            self._bring(wanted[first : first + AT_ONCE], self._missed)
        self._brought.update(wanted)

    def lend(self, pages: Sequence[int]) -> None:
        """Copies its part of ``pages`` to each other host; returns when it is there. Raises as ``make_whole``."""
        for host, part in enumerate(self._parts[1:], 1):
            self._show(host, pages, part)
        self._bring(pages, ((),) * len(self._parts))  # they bring nothing, but meet behind what was shown

    def let_go(self, pages: Sequence[int]) -> None:
        """Does nothing, because what was brought takes no other memory than the lead's pages."""
