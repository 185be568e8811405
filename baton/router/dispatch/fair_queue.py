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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

LOOK_AHEAD = 8  # tickets of a queue that are tried when those before them find no room
PATIENCE_S = 2.0  # a ticket that waited longer is passed by nobody of its pool
LEVEL_WORK = 65_536.0  # tokens of work that a level of priority is worth
MOST_IDLE = 1024  # pools whose virtual time is kept while nobody has shares: clients name models that aren't there
MOST_OUTPUT = 1024  # tokens counted of max_tokens, because it is often a bound that no answer reaches

Order = tuple[float, int]  # where a request's share begins in virtual time, then its arrival: lower is sooner


class RequestLoad(msgspec.Struct, frozen=True):
    """Holds what a request brings to the queue.

    ``work`` is in tokens, ``size`` the bytes that it holds while in flight, ``slo_ttft_s`` seconds or 0 for no SLO;
    a lower ``priority`` is sooner, ``weight`` is the tenant's share.
    """

    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    work: float = 1.0
    size: int = 0
    slo_ttft_s: float = 0.0


class Place(NamedTuple):
    """Holds a request's place in order and the load that it was given for."""

    order: Order
    load: RequestLoad

    @property
    def begin(self) -> float:
        """Returns the virtual time at which the request's share begins, whatever its priority."""
        return self.order[0] - self.load.priority * LEVEL_WORK


class Waiting(Protocol):
    """Declares a waiting request: the pool (model), the name of its queue in the pool, its place in order, and
    since when it waits (seconds).
    """

    @property
    def pool(self) -> str:
        """Returns the model that the request is for."""

    @property
    def queue(self) -> str:
        """Returns the name of its queue within the pool."""

    @property
    def order(self) -> Order:
        """Returns its place in the queue; the lowest is next."""

    @property
    def since(self) -> float:
        """Returns when it began to wait, in seconds."""


def work_of(prompt_tokens: int, max_tokens: int, choices: int = 1) -> int:
    """Returns the tokens that a request is expected to prefill and generate, counting at most MOST_OUTPUT of
    max_tokens.
    """
    return prompt_tokens + choices * min(max_tokens, MOST_OUTPUT)


W = TypeVar("W", bound=Waiting)


class FairShares:
    """Keeps the virtual time of each pool, and the virtual time at which each tenant's next request begins."""

    def __init__(self) -> None:
        self._virtual: dict[str, float] = {}
        self._least_virtual = 0.0  # where the virtual time of a pool begins that isn't known
        self._last: defaultdict[str, dict[str, float]] = defaultdict(dict)  # by pool and tenant
        self._arrivals = itertools.count()
        self._first_arrivals: dict[str, int] = {}  # by pool, since its shares were reset
        self._least_arrival = 0

    def order(self, pool: str, load: RequestLoad) -> Order:
        """Returns the order key of a new request: the virtual time at which its share begins, shifted by its
        priority; then its arrival number.
        """
        begin = max(self._virtual_of(pool), self._last[pool].get(load.tenant, 0.0))
        self._last[pool][load.tenant] = begin + load.work / load.weight
        return begin + load.priority * LEVEL_WORK, next(self._arrivals)

    def placed(self, pool: str, placed: Place, firsts: Iterable[Place] = ()) -> None:
        """Advances the pool's virtual time to where the placed request's share began.

        ``firsts`` are the first of those that still wait, of each queue. If the placed request passed one of them,
        because it found room or was ready sooner, or because its own queue is the shorter one, virtual time goes no
        further than to where the share of that one began: otherwise a tenant that asks now would wait until all
        whom the placed request passed are placed. One that is behind it in order, as by its priority, holds nothing
        back.
        """
        passed = (first.begin for first in firsts if first.order < placed.order)
        self._virtual[pool] = max(self._virtual_of(pool), min([placed.begin, *passed]))

    def refund(self, pool: str, place: Place) -> None:
        """Takes back what ``order`` counted for a request that was refused or left before it was placed: its tenant
        is not put back for work that nobody does.
        """
        last, tenant = self._last.get(pool, {}), place.load.tenant
        if tenant in last and place.order[1] >= self._first_arrivals.get(pool, self._least_arrival):
            last[tenant] -= place.load.work / place.load.weight

    def pools(self) -> list[str]:
        """Returns the pools in which tenants have had shares since these were reset."""
        return list(self._last)

    def idle(self, pool: str) -> None:
        """Resets the shares of all tenants of a pool in which nobody waits.

        Virtual time only moves on: a request that will wait again keeps its place before all that come later.
        """
        lasts = self._last.pop(pool, None)
        if lasts is not None:
            self._virtual[pool] = max(self._virtual_of(pool), *lasts.values())
            self._first_arrivals[pool] = next(self._arrivals)
            if len(self._virtual) > len(self._last) + MOST_IDLE:
                self._forget_idle()

    def _virtual_of(self, pool: str) -> float:
        return self._virtual.setdefault(pool, self._least_virtual)

    def _forget_idle(self) -> None:
        """Drops what is kept of pools in which nobody has shares. They begin later than any of them has come to, so
        that their virtual time moves on as well.
        """
        for pool in self._virtual.keys() - self._last.keys():
            self._least_virtual = max(self._least_virtual, self._virtual.pop(pool))
            self._least_arrival = max(self._least_arrival, self._first_arrivals.pop(pool, 0))


class FairQueue(Generic[W]):
    """Keeps waiting requests in order, in one list per pool (model) and queue name (context class)."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, str], list[W]] = defaultdict(list)

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def __iter__(self) -> Iterator[W]:
        return itertools.chain.from_iterable(self._queues.values())

    def waits(self, pool: str) -> bool:
        """Returns whether any request of the pool waits."""
        return any(queue for (of, _), queue in self._queues.items() if of == pool)

    def add(self, waiting: W) -> None:
        """Inserts the request at its place in order."""
        insert(self._queues[waiting.pool, waiting.queue], waiting)

    def remove(self, waiting: W) -> None:
        """Takes the request out of its queue if it is there."""
        remove(self._queues[waiting.pool, waiting.queue], waiting)

    def pump(self, now: float, attempt: Callable[[W], bool]) -> None:
        """Offers queued requests to ``attempt``, queue by queue, starting with the queue whose head is first in
        order.

        ``attempt`` returns True if the request's wait is over (placed or refused), else the request keeps its
        place. In a queue at most LOOK_AHEAD requests may be passed over, and none that has waited over PATIENCE_S.
        A request isn't in the queue while it is attempted, so an attempt may pump.
        """
        stopped: set[str] = set()
        waiting = [(queue[0].order, pool, queue) for (pool, _), queue in self._queues.items() if queue]
        for _, pool, queue in sorted(waiting, key=itemgetter(0)):
            if pool not in stopped and not _serve(queue, now, attempt):
                stopped.add(pool)


def insert(queue: list[W], waiting: W) -> None:
    """Inserts a request into a list sorted by ``order``."""
    bisect.insort(queue, waiting, key=_order)


def remove(queue: list[W], waiting: W) -> bool:
    """Removes a request from a list sorted by ``order``; returns False if it isn't there."""
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
