"""The queue of one pool (model): requests that wait, in order and by context class, those that are late, and the
pace at which they are placed.

Knows nothing of who is tried next or refused: ``Admission`` asks how much work is before a newcomer, and how soon
that will be placed. Time is passed in.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from baton.router.dispatch.fair_queue import Order
from baton.router.dispatch.late_tickets import LateTickets
from baton.router.dispatch.throttle import LEAST_BUDGET
from baton.router.dispatch.ticket import Ticket

ENOUGH = 8  # placements in a row, with others waiting, that make a pace
PACED = 64  # last placements by which a pool's pace is estimated
BLOCK = 64  # requests in a block whose work is kept as a sum, because a sum over all is too slow for each newcomer
MOMENT_S = 1e-3  # seconds that placements are taken to have lasted at least


class PlacedWork(NamedTuple):
    """Holds when a request was placed, in seconds, its work in tokens, and its context class."""

    at: float
    work: float
    queue: str


def _order(waiting: Ticket) -> Order:
    return waiting.order


class OrderedWork:
    """Keeps waiting requests in order, and sums of their work by which a newcomer's wait is found quickly.

    The requests lie in blocks of at most 2 * BLOCK; ``_work`` has the sum of each block's work.
    """

    def __init__(self) -> None:
        self._blocks: list[list[Ticket]] = []
        self._work: list[float] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def last(self) -> Ticket:
        """Returns the last in order; there must be one."""
        return self._blocks[-1][-1]

    def first_but(self, waiting: Ticket) -> Ticket | None:
        """Returns the first in order that isn't ``waiting`` and that a worker could take, None if there is none
        among the first BLOCK or more.
        """
        first = (one for block in self._blocks[:2] for one in block)
        return next((one for one in first if one is not waiting and not one.none_able), None)

    def add(self, waiting: Ticket) -> None:
        """Inserts a request at its place in order."""
        self._count += 1
        if not self._blocks:
            self._blocks, self._work = [[waiting]], [waiting.load.work]
            return
        at = min(self._block_of(waiting.order), len(self._blocks) - 1)
        insort(self._blocks[at], waiting, key=_order)
        self._work[at] += waiting.load.work
        if len(self._blocks[at]) > 2 * BLOCK:
            halves = self._blocks[at][:BLOCK], self._blocks[at][BLOCK:]
            self._blocks[at : at + 1] = halves
            self._work[at : at + 1] = [sum(one.load.work for one in half) for half in halves]

    def remove(self, waiting: Ticket) -> None:
        """Takes a request out, which must be there; its order is its own."""
        at = self._block_of(waiting.order)
        self._blocks[at].remove(waiting)
        self._work[at] -= waiting.load.work
        self._count -= 1
        if not self._blocks[at]:
            del self._blocks[at], self._work[at]

    def work_before(self, order: Order) -> float:
        """Returns the work, in tokens, of the requests that are before ``order``."""
        at = self._block_of(order)
        if at == len(self._blocks):
            return sum(self._work)
        before = takewhile(lambda other: other.order < order, self._blocks[at])
        return sum(self._work[:at]) + sum(other.load.work for other in before)

    def _block_of(self, order: Order) -> int:
        """Returns the index of the first block whose last request isn't before ``order``."""
        return bisect_left(self._blocks, order, key=lambda block: block[-1].order)


class PoolQueue:
    """Keeps the requests of one pool that wait, by context class, and its last placements."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._classes: dict[str, OrderedWork] = {}
        self._late: dict[str, LateTickets] = {}
        self._placements: deque[PlacedWork] = deque(maxlen=PACED)

    def __len__(self) -> int:
        """Returns the number of requests that wait."""
        return sum(map(len, self._classes.values()))

    def waiting(self, queue: str) -> int:
        """Returns the number of requests of the context class that wait."""
        return len(self._classes[queue]) if queue in self._classes else 0

    def last(self, queue: str) -> Ticket:
        """Returns the last in order of the context class, of which somebody must wait."""
        return self._classes[queue].last

    def firsts_but(self, waiting: Ticket) -> list[Ticket]:
        """Returns the first in order of each class, without ``waiting`` and without those that no worker could
        take.
        """
        firsts = (of_class.first_but(waiting) for of_class in self._classes.values())
        return [first for first in firsts if first is not None]

    def add(self, waiting: Ticket) -> None:
        """Adds a request that waits from now on."""
        self._classes.setdefault(waiting.queue, OrderedWork()).add(waiting)
        self._late.setdefault(waiting.queue, LateTickets(LEAST_BUDGET)).add(waiting)

    def remove(self, waiting: Ticket) -> None:
        """Takes out a request that no longer waits."""
        of_class = self._classes[waiting.queue]
        of_class.remove(waiting)
        self._late[waiting.queue].remove(waiting)
        if not of_class:
            del self._classes[waiting.queue], self._late[waiting.queue]

    def take_late(self, service_s: Callable[[str], float]) -> list[Ticket]:
        """Returns those whose first tokens can't come in time any more, each once; they wait until ``remove``.

        ``service_s`` gives the seconds that the way behind the queue takes in a context class.
        """
        now = self._clock()
        return [late for queue, found in self._late.items() if found for late in found.take(now, service_s(queue))]

    def placed(self, waiting: Ticket) -> None:
        """Notes that a request is placed now."""
        self._placements.append(PlacedWork(self._clock(), waiting.load.work, waiting.queue))

    def wait_s(self, order: Order) -> float:
        """Returns the seconds until those before ``order`` are placed, at the pace of the last placements; 0 while
        there are too few of these. What a flood has queued behind it doesn't count.
        """
        if len(self._placements) < ENOUGH:
            return 0.0
        before = sum(of_class.work_before(order) for of_class in self._classes.values())
        return before / (sum(one.work for one in self._placements) / self._elapsed())

    def emptied_s(self, queue: str) -> float:
        """Returns the seconds until the context class is likely to have emptied, at its share of the last
        placements; at the pool's pace, behind all that wait, if it had none of them. 0 while there are too few.
        """
        if len(self._placements) < 2:
            return 0.0
        of_class = sum(one.queue == queue for one in self._placements)
        waiting, placed = (self.waiting(queue), of_class) if of_class else (len(self), len(self._placements))
        return waiting * self._elapsed() / placed

    def _elapsed(self) -> float:
        return max(MOMENT_S, self._clock() - self._placements[0].at)
