"""The order in which requests wait, and who is tried next: the router's queue without an event loop.

Knows nothing of asyncio, of workers, or of who is refused: the router's ``Admission`` and the planner's simulator
both run it. Time is passed in.

Fair shares are start-time fair queueing (Goyal, Vin, Cheng 1996): a tenant's next request begins where its last one
ends in virtual time, which advances with the work that is placed; work is divided by the tenant's weight. A level
of priority is worth LEVEL_WORK of virtual time, so that nobody waits for ever.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

import msgspec

LOOK_AHEAD = 8  # tickets of a queue that are tried when those before them find no room
PATIENCE_S = 2.0  # a ticket that waited longer is passed by nobody of its pool
LEVEL_WORK = 65_536.0  # tokens of work that a level of priority is worth
MOST_OUTPUT = 1024  # tokens counted of max_tokens, because it is often a bound that no answer reaches

Order = tuple[float, int]  # where a request's share begins in virtual time, then its arrival: lower is sooner


class RequestLoad(msgspec.Struct, frozen=True):
    """Holds what a request brings: ``work`` in tokens, ``size`` in bytes while it is here, its SLO in seconds
    or 0.
    """

    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    work: float = 1.0
    size: int = 0
    slo_ttft_s: float = 0.0


class Waiting(Protocol):
    """Describes a request that waits: its model's pool, the name of its queue in it, its place, and since when
    (seconds).
    """

    @property
    def pool(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def order(self) -> Order: ...
    @property
    def since(self) -> float: ...


def work_of(prompt_tokens: int, max_tokens: int, choices: int = 1) -> int:
    """Returns the tokens that a request is expected to read and write; see MOST_OUTPUT."""
    return prompt_tokens + choices * min(max_tokens, MOST_OUTPUT)


W = TypeVar("W", bound=Waiting)


class FairShares:
    """Keeps the virtual time of each pool, and where each tenant's next request begins in it."""

    def __init__(self) -> None:
        self._virtual: Counter[str] = Counter()
        self._last: dict[tuple[str, str], float] = {}
        self._arrivals = itertools.count()

    def order(self, pool: str, load: RequestLoad) -> Order:
        """Returns where the newcomer's share of the pool's work begins, moved by its priority; then its arrival."""
        begin = max(self._virtual[pool], self._last.get((pool, load.tenant), 0.0))
        self._last[pool, load.tenant] = begin + load.work / load.weight
        return begin + load.priority * LEVEL_WORK, next(self._arrivals)

    def placed(self, pool: str, order: Order, load: RequestLoad) -> None:
        """Advances the pool's virtual time to where the placed request's share began."""
        begin = order[0] - load.priority * LEVEL_WORK
        self._virtual[pool] = max(self._virtual[pool], begin)  # type: ignore[assignment]

    def idle(self) -> None:
        """Begins all shares anew, because nobody waits.

        Virtual time only moves on: a request that will wait again keeps its place before all that come later.
        """
        for (pool, _), last in self._last.items():
            self._virtual[pool] = max(self._virtual[pool], last)  # type: ignore[assignment]
        self._last.clear()


class FairQueue(Generic[W]):
    """Keeps who waits, in order, in one list per pool and queue name: as many as there are models and context
    classes.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, str], list[W]] = defaultdict(list)

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def __iter__(self) -> Iterator[W]:
        return itertools.chain.from_iterable(self._queues.values())

    def add(self, waiting: W) -> None:
        """Puts the request at its place."""
        insert(self._queues[waiting.pool, waiting.queue], waiting)

    def remove(self, waiting: W) -> None:
        """Takes the request out if it is there."""
        remove(self._queues[waiting.pool, waiting.queue], waiting)

    def pump(self, now: float, attempt: Callable[[W], bool]) -> None:
        """Gives each queue one turn, the one whose head comes first, first.

        ``attempt`` says whether a request's wait is over, because it was placed or refused; else the request keeps
        its place. It isn't in the queue while it is attempted, so that an attempt may pump for the others.
        """
        stopped: set[str] = set()
        waiting = [(queue[0].order, pool, queue) for (pool, _), queue in self._queues.items() if queue]
        for _, pool, queue in sorted(waiting, key=itemgetter(0)):
            if pool not in stopped and not _serve(queue, now, attempt):
                stopped.add(pool)


def insert(queue: list[W], waiting: W) -> None:
    """Puts a request into a list that is in order."""
    bisect.insort(queue, waiting, key=_order)


def remove(queue: list[W], waiting: W) -> bool:
    """Takes a request out of a list that is in order; False when it isn't there."""
    at = bisect.bisect_left(queue, waiting.order, key=_order)
    while at < len(queue) and queue[at].order == waiting.order:
        if queue[at] is waiting:
            del queue[at]
            return True
        at += 1
    return False


def _serve(queue: list[W], now: float, attempt: Callable[[W], bool]) -> bool:
    """Tries those for whom there may be room; False when somebody has waited too long to be passed."""
    passed: list[W] = []
    while queue and len(passed) < LOOK_AHEAD:
        waiting = queue.pop(0)
        if attempt(waiting):
            continue
        passed.append(waiting)
        if now - waiting.since > PATIENCE_S:
            break
    queue[:0] = passed
    return not passed or now - passed[-1].since <= PATIENCE_S


def _order(waiting: Waiting) -> Order:
    return waiting.order
