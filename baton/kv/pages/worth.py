"""Orders cached pages by the value of keeping them, learned from how pages were used. Torch-free.

Knows nothing of leases. Pages that join together with the same history form a *run*, a chain's tail first; a run is
evicted from its tail on, because a block without those before it can't be found. Which runs are next is planned for
many evictions at once, so that each costs little; pages that join meanwhile are included in the next plan.
Evicted pages are remembered for a while by the hash of their block (a sample of them, in a large pool): if they are
computed again, that shows how much longer they should have been kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

import numpy as np

from baton.kv.pages.reuse import CLASSES, HORIZON, PageHistory, ReuseTable, bins_of

REMEMBERED = 16_384  # evicted pages remembered, at about 250 bytes each
PLANS = 8  # plans in the time in which the pool's pages are handed out once
LESSONS, LEAST_LESSON = 8, 512  # evaluations of the table in that time; least pages between two
LEAST_PLAN = 64  # least evictions of a plan, because making one takes about a millisecond


class Run:
    """Pages that joined together, a chain's tail first; those before index ``gone`` were evicted.

    ``left`` counts the pages that still belong to the run; others stay listed until they are half of the list.
    """

    __slots__ = ("at", "cls", "cost", "deeper", "gone", "kind", "left", "pages")

    def __init__(self, kind: PageHistory, cls: int, at: int, cost: float, deeper: Run | None) -> None:
        self.kind, self.cls, self.at, self.cost, self.deeper = kind, cls, at, cost, deeper
        self.pages: list[int] = []
        self.gone = self.left = 0


class WorthOrder:
    """Orders some of the pages 0 to ``pages`` - 1 by worth, the least first. ``block_of[page]`` is the hash of a
    page's block.

    Worth is uses per page and time, times the cost of computing the block again: a block deep in its chain attends
    to all blocks before it (``placed``, ``priced``).
    """

    def __init__(self, pages: int, block_of: Sequence[bytes | None]) -> None:
        self._run: list[Run | None] = [None] * pages
        self._kind: list[PageHistory] = [NEW] * pages
        self._block_of, self._table = block_of, ReuseTable(pages)
        self._runs: dict[Run, None] = {}
        self._plan: list[Run] = []
        self._left = 0  # evictions until the next plan
        self._stretch = max(LEAST_PLAN, pages // PLANS)
        self._count = self._handed = 0
        self._worth, self._learn_at = np.zeros((CLASSES, 0)), 0  # as learned last, and when to learn again
        self._lesson = max(LEAST_LESSON, pages // LESSONS)
        self._weight = max(1, pages * HORIZON // REMEMBERED)
        self._remembered: OrderedDict[bytes, tuple[PageHistory, int, int]] = (
            OrderedDict()
        )  # a dict's first is slow to find
        self._depth = [0] * pages
        self._pair_cost = 0.0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: int) -> bool:
        return self._run[page] is not None

    def __iter__(self) -> Iterator[int]:
        return (page for page, run in enumerate(self._run) if run is not None)

    def handed_out(self, pages: int) -> None:
        """Counts ``pages`` pages that were given to leases; ages are measured by this count."""
        self._handed += pages

    def placed(self, pages: Sequence[int], first: int) -> None:
        """Sets the positions of ``pages`` in their chain: ``first`` and the following."""
        for depth, page in enumerate(pages, first):
            self._depth[page] = depth

    def priced(self, pair_cost: float) -> None:
        """Sets the cost that each preceding block adds to computing a block, in units of the cost of a chain's
        first block.
        """
        self._pair_cost = pair_cost

    def add(self, pages: Sequence[int], hinted: Collection[int] = ()) -> None:
        """Adds the cached pages of a lease, none of which may be there, a chain's tail first.

        A client will use those of ``hinted`` again.
        """
        kinds = [self._recalled(page) for page in pages] if self._remembered else [self._kind[p] for p in pages]
        chain = next((kind for kind in kinds if kind.uses), NEW)
        run: Run | None = None
        at = 0
        marks = [(kind.uses, page in hinted) for kind, page in zip(kinds, pages, strict=True)]
        for (uses, is_hinted), group in groupby(marks):
            end = at + sum(1 for _ in group)
            kind = PageHistory(uses, max(chain.turns, uses), chain.gap, is_hinted)
            run = self._begin(kind, pages[at:end], run)
            at = end
        self._count += len(pages)

    def remove(self, pages: Sequence[int]) -> None:
        """Removes pages because they are used again; all must be there."""
        run_of = self._run
        for run, group in groupby(pages, key=run_of.__getitem__):
            assert run is not None, "a page isn't cached"
            used = list(group)
            self._table.used(run.cls, run.at, self._handed, len(used))
            kind = PageHistory(run.kind.uses + 1, run.kind.uses + 1, self._handed - run.at)
            for page in used:
                run_of[page], self._kind[page] = None, kind
            self._shrink(run, len(used))
        self._count -= len(pages)

    def discard(self, pages: Sequence[int]) -> None:
        """Removes pages whose blocks are lost, and their histories; all must be there."""
        for page in pages:
            run = self._run[page]
            assert run is not None, "a page isn't cached"
            self._table.left(run.cls, run.at, 1.0)
            self._run[page], self._kind[page] = None, NEW
            self._shrink(run, 1)
        self._count -= len(pages)

    def take(self, count: int, kept: Collection[int] = ()) -> list[int]:
        """Removes and returns the ``count`` pages worth least, none of ``kept``; there must be that many."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._plan or self._left <= 0:
                self._make_plan(kept)
            self._evict(self._plan[-1], count - len(taken), kept, taken)
        self._count -= count
        return taken

    def _begin(self, kind: PageHistory, pages: Sequence[int], deeper: Run | None) -> Run:
        cost = 1.0 + self._pair_cost * self._depth[pages[0]]
        run = Run(kind, self._table.class_of(kind), self._handed, cost, deeper)
        run.pages, run.left = list(pages), len(pages)
        for page in pages:
            self._run[page], self._kind[page] = run, kind
        self._runs[run] = None
        self._table.joined(run.cls, run.at, len(pages))
        return run

    def _shrink(self, run: Run, pages: int) -> None:
        """Counts ``pages`` pages that left ``run``. An empty run is dropped at once: without evictions nothing else
        would drop it.
        """
        run.left -= pages
        if not run.left:
            self._runs.pop(run, None)
            run.pages, run.gone = [], 0
        elif 2 * run.left < len(run.pages):
            run.pages = [page for page in run.pages[run.gone :] if self._run[page] is run]
            run.gone = 0

    def _recalled(self, page: int) -> PageHistory:
        """Returns the history of a page; of a new one, that which is remembered of its block."""
        block = self._block_of[page]
        found = self._remembered.pop(block, None) if block is not None else None
        if found is None:
            return self._kind[page]
        kind, at, cls = found
        self._table.used(cls, at, self._handed, self._weight)
        return PageHistory(kind.uses + 1, kind.uses + 1, self._handed - at)

    def _evict(self, run: Run, most: int, kept: Collection[int], taken: list[int]) -> None:
        """Appends up to ``most`` pages of ``run`` to ``taken``; removes the run from the plan if it has none left
        to take.
        """
        spared: list[int] = []
        evicted, pages, most = 0, run.pages, min(most, self._left)
        while run.gone < len(pages) and most:
            page = pages[run.gone]
            run.gone += 1
            if self._run[page] is not run:
                continue  # it was used since
            if page in kept:
                spared.append(page)
                continue
            self._forget(page, run)
            taken.append(page)
            evicted += 1
            most -= 1
            self._left -= 1
        if run.gone == len(pages):
            self._plan.pop()
        if spared:
            run.pages = spared + pages[run.gone :]
            run.gone = 0
        self._shrink(run, evicted)

    def _forget(self, page: int, run: Run) -> None:
        """Removes an evicted page; one in ``_weight`` of them stays observed, as a sample."""
        self._run[page], self._kind[page] = None, NEW
        block = self._block_of[page]
        assert block is not None, f"page {page} holds no block"
        if self._weight > 1 and _number(block) % self._weight:
            self._table.left(run.cls, run.at, 1.0)
            return
        self._remembered[block] = run.kind, run.at, run.cls
        if self._weight > 1:
            self._table.joined(run.cls, run.at, self._weight - 1.0)
        self._trim()

    def _trim(self) -> None:
        remembered, horizon = self._remembered, self._table.horizon
        while remembered:
            block = next(iter(remembered))
            _, at, cls = remembered[block]
            expired = self._handed - at >= horizon
            if not expired and len(remembered) <= REMEMBERED:
                return
            del remembered[block]
            if not expired:
                self._table.lost(cls, at, self._handed, self._weight)

    def _make_plan(self, kept: Collection[int]) -> None:
        """Orders all runs, the one that is worth least last."""
        runs = [run for run in self._runs if not kept or self._holds_any(run, kept)]
        if self._handed >= self._learn_at:
            self._worth = self._table.worth(self._handed, range(CLASSES))
            self._learn_at = self._handed + self._lesson
        ages = np.array([self._handed - run.at for run in runs])
        found = self._worth[[run.cls for run in runs], bins_of(ages)] * np.array([run.cost for run in runs])
        place = {run: at for at, run in enumerate(runs)}
        for at, run in enumerate(runs):  # deeper ones come first
            if run.deeper in place:
                found[at] = max(found[at], found[place[run.deeper]])
        order = np.lexsort((np.arange(len(runs)), found))[::-1]
        self._plan, self._left = [runs[at] for at in order], self._stretch

    def _holds_any(self, run: Run, kept: Collection[int]) -> bool:
        of = self._run
        return any(of[page] is run and page not in kept for page in run.pages[run.gone :])


def _number(block: bytes | int) -> int:
    """Returns a number of a block that says whether its page is in the sample; the simulator's ids are numbers."""
    return block if isinstance(block, int) else int.from_bytes(block[-4:], "little")


NEW = PageHistory()
