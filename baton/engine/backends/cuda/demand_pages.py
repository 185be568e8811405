"""Tracks which KV pages are current on a GPU and which on the host, if the host's are copies made on demand.
Torch-free.

Knows nothing of sequences or of who reads a page. A page's bytes are current on one side or on both:

    HOST   others may have written the host's page since it was leased; a step that needs it brings it to the card
    CARD   a step or a handoff wrote the card's page
    BOTH   it was copied, one way or the other, and nobody wrote it since

What a step brings to the card may be read on the host until that step has ended, because CUDA lets copies of memory
that isn't pinned go on behind their call.

The host's memory is sparse: a page takes some once it is written there. What the card has as well, and what no
lease has any more, is kept only while somebody reads it, and beyond that as long as all copies together stay within
a limit. Whoever asks for more has to heed ``copies_left``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from baton.engine.plan import SequenceStep
from baton.protos.measurements import SharedPages
from baton.protos.nouns import BLOCK_TOKENS

HOST, CARD, BOTH = 0, 1, 2
UNDER_WAY = 3  # steps of which the results aren't known yet, at most, with the one that is begun
MOST_KNOWN = 8192  # sequences of which the last step is remembered; the oldest is forgotten first


class DemandPages:
    """Implements ``Mirror`` for ``pages`` pages on a card; the host keeps at most ``most`` copies that it needn't.

    ``fetch`` copies pages from the card to the host and waits; ``drop`` gives a host page's memory back. ``shared``
    names the card's memory for other processes, None if they can't open it.
    """

    def __init__(
        self, pages: int, most: int, fetch: Callable[[Sequence[int]], None], drop: Callable[[int], None]
    ) -> None:
        self.shared: SharedPages | None = None
        self._most, self._fetch, self._drop = most, fetch, drop
        self._current = np.full(pages, HOST, np.int8)
        self._in_memory: set[int] = set()  # pages of the host that take memory
        self._readers: Counter[int] = Counter()
        self._spare: dict[int, None] = {}  # pages that take the host's memory without need, the oldest first
        self._brought: deque[Sequence[int]] = deque()  # by steps that ran and haven't ended: the card may read them
        self._changed: deque[set[int]] = deque(maxlen=UNDER_WAY)  # pages that the card's last steps may change
        # By sequence its table, and how many blocks of it the card has. They stay there while the sequence has the
        # pages, because others write pages only between a lease and its first step.
        self._known: dict[int, tuple[Sequence[int], int]] = {}

    @property
    def copies(self) -> int:
        """Returns how many of the host's pages take memory."""
        return len(self._in_memory)

    @property
    def copies_left(self) -> int:
        """Returns how many pages more the host can keep that it needs; 0 or less where there are too many."""
        return self._most - (len(self._in_memory) - len(self._spare))

    # ---- steps ----

    def missing(self, items: Sequence[SequenceStep]) -> list[int]:
        """Returns the pages that must be copied to the card before a step of ``items``, ascending, without
        duplicates.
        """
        found = sorted({page for item in items for page in self._unknown(item) if self._current[page] == HOST})
        self._changed.append({*found, *(page for item in items for page in _written(item))})
        return found

    def _unknown(self, item: SequenceStep) -> Iterable[int]:
        """Yields the pages with tokens before the item's start that it attends to, except those of its last
        step.
        """
        table, known = self._known.get(item.seq, (None, 0))
        first = known if table is item.pages else 0
        gap = range(*item.gap)
        return (item.pages[block] for block in range(first, _blocks(item.start)) if block not in gap)

    def ran(self, items: Sequence[SequenceStep], brought: Sequence[int]) -> None:
        """Records that the step of ``items`` was begun, before which the pages ``brought`` are copied to the card.
        What comes behind it there sees its writes; its end is ``ended``.
        """
        self._current[brought] = BOTH
        self._in_memory.update(brought)
        self._readers.update(brought)
        self._brought.append(brought)
        written = [page for item in items for page in _written(item)]
        self._current[written] = CARD
        for item in items:
            self._known.pop(item.seq, None)  # the newest are last
            self._known[item.seq] = item.pages, _blocks(item.start + item.trunk)
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._settle(written)

    def ended(self) -> None:
        """Records that the oldest step that ``ran`` and hasn't ended has ended, also if it failed."""
        self.let_go(self._brought.popleft())

    def failed(self) -> None:
        """Records that one of the last steps failed. They can only have written their own tokens' KV, which nobody
        has counted yet, so what the card alone has stays; of pages that they may have changed the host's copies are
        taken for the current ones.
        """
        self._known.clear()
        for page in set().union(*self._changed):
            if self._current[page] == BOTH:
                self._current[page] = HOST
                self._spare.pop(page, None)

    # ---- Mirror ----

    def opened(self, pages: Sequence[int]) -> None:
        """Records that others may write the host's or the card's ``pages`` from now on."""
        self._current[list(pages)] = HOST
        self._in_memory.update(pages)
        for page in pages:
            self._spare.pop(page, None)

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Records that a handoff wrote the pages of ``table`` at indices ``blocks`` on the card, and not the
        host's.
        """
        pages = [table[block] for block in blocks]
        self._current[pages] = CARD
        self._settle(pages)

    def taken(self, pages: Sequence[int]) -> None:
        """Records that ``pages`` were leased anew: what was in them counts no more, and others may write them."""
        self._current[list(pages)] = HOST
        for page in pages:
            self._spare.pop(page, None)

    def freed(self, pages: Sequence[int]) -> None:
        """Records that nobody has ``pages`` any more, and that what is in them counts no more, wherever it is."""
        self._current[list(pages)] = CARD
        self._settle(pages)

    def make_whole(self, pages: Sequence[int]) -> None:
        """Copies what only the card has of ``pages`` to the host, where it stays until ``let_go``. Raises
        BatonError.
        """
        wanted = sorted({page for page in pages if self._current[page] == CARD})
        if wanted:
            self._fetch(wanted)
            self._current[wanted] = BOTH
        self._in_memory.update(pages)
        self._readers.update(pages)
        for page in pages:
            self._spare.pop(page, None)

    def let_go(self, pages: Sequence[int]) -> None:
        """Records that whoever asked for ``pages`` by ``make_whole`` reads them no more."""
        self._readers.subtract(pages)
        for page in pages:
            if self._readers[page] <= 0:
                del self._readers[page]
        self._settle(pages)

    def lend(self, pages: Sequence[int]) -> None:
        """Does nothing, because no card has ranks on other hosts."""

    def _settle(self, pages: Iterable[int]) -> None:
        """Notes which of ``pages`` the host needn't keep, and gives back the oldest such pages beyond the limit."""
        for page in pages:
            if page in self._in_memory and page not in self._readers and self._current[page] != HOST:
                self._spare.pop(page, None)
                self._spare[page] = None
        while len(self._in_memory) > self._most and self._spare:
            page = next(iter(self._spare))
            del self._spare[page]
            self._in_memory.discard(page)
            self._current[page] = CARD
            self._drop(page)


def _written(item: SequenceStep) -> Iterable[int]:
    """Yields the pages to which the item's tokens are appended, and those of its drafts' branches."""
    yield from item.pages[item.start // BLOCK_TOKENS : _blocks(item.start + len(item.tokens))]
    for branch in item.draft_branches:
        yield from branch.pages


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
