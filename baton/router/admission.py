"""The router's queue: who waits, in what order, and when somebody may be placed.

Knows nothing of workers or policies: a ticket comes with an attempt, a function that places its request and
returns the placement, or None when there is no room now. One event loop, no locks.

    join ──> [class queue, by (priority, arrival)] ── attempt() is not None ──> placed
                   ^                                                              │
                   └───────── wait() again: the old place (worker lost, full) ────┘
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.protos.errors import Draining, Overloaded

LOOK_AHEAD = 8  # tickets of a queue that are tried when those before them find no room
PATIENCE_S = 2.0  # a ticket that waited longer is passed by nobody of its pool
RETRY_AFTER_S = (1.0, 60.0)


class Placement(Protocol):
    """What an attempt reserves."""

    def close(self) -> None:
        """Give it back."""


T = TypeVar("T", bound=Placement)


class Ticket(Generic[T]):
    """A place in the queue. It stays the request's own until ``leave``, however often it waits."""

    def __init__(self, admission: Admission, pool: str, queue: str, order: tuple[int, int], since: float) -> None:
        self.pool, self.queue, self.order, self.since = pool, queue, order, since
        self.counted = False
        self._admission = admission
        self._attempt: Callable[[], T | None] | None = None
        self._placed: asyncio.Future[T] | None = None

    async def wait(self, attempt: Callable[[], T | None]) -> T:
        """Wait for a turn in which ``attempt`` finds room; its placement. What it raises is raised here."""
        placed: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._attempt, self._placed = attempt, placed
        self._admission.enqueue(self)
        try:
            return await placed
        except asyncio.CancelledError:
            # Cancelled between its turn and its waking up: nobody else knows of the placement.
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                placed.result().close()
            raise
        finally:
            self._admission.dequeue(self)

    def take_turn(self) -> bool:
        """Try now; False when there is no room. For Admission alone."""
        assert self._attempt is not None
        assert self._placed is not None
        if self._placed.done():
            return True
        try:
            placement = self._attempt()
        except Exception as error:
            self._placed.set_exception(error)
            return True
        if placement is None:
            return False
        self._placed.set_result(placement)
        return True

    def leave(self) -> None:
        """Give up the place. Idempotent."""
        self._admission.dequeue(self)


class Admission:
    """Bounded queues, one per pool (model) and context class. ``wake`` it when something may have made room."""

    def __init__(self, max_queue: int, clock: Callable[[], float]) -> None:
        self._max_queue, self._clock = max_queue, clock
        self._queues: dict[tuple[str, str], list[Ticket]] = {}
        self._counted: Counter[str] = Counter()
        self._arrivals = itertools.count()
        self._placements: deque[float] = deque(maxlen=64)
        self._waking: asyncio.Handle | None = None
        self._closed = False

    def join(self, pool: str, context_class: str, priority: int = 0) -> Ticket:
        """A place at the end of its class. Raises Overloaded when the class is full, Draining after ``close``."""
        if self._closed:
            raise Draining("the router is shutting down; send the request to another one")
        if self._counted[context_class] >= self._max_queue:
            raise Overloaded(
                f"{self._max_queue} {context_class} requests wait already; try again later",
                retry_after_s=self._retry_after(context_class),
            )
        ticket: Ticket = Ticket(self, pool, context_class, (priority, next(self._arrivals)), self._clock())
        ticket.counted = True
        self._counted[context_class] += 1
        return ticket

    def beside(self, ticket: Ticket) -> Ticket:
        """A second place next to ``ticket`` (another choice of its request); it doesn't fill the queue."""
        return Ticket(self, ticket.pool, ticket.queue, ticket.order, self._clock())

    def waiting(self, context_class: str) -> int:
        """Requests of the class that were not placed yet."""
        return self._counted[context_class]

    def close(self) -> None:
        """Take nobody new."""
        self._closed = True

    def wake(self) -> None:
        """Something changed: try those who wait, once, soon."""
        if self._waking is None and self._queues:
            self._waking = asyncio.get_running_loop().call_soon(self._pump)

    # ---- for tickets ---------------------------------------------------------------------------------

    def enqueue(self, ticket: Ticket) -> None:
        """Put it at its place."""
        queue = self._queues.setdefault((ticket.pool, ticket.queue), [])
        bisect.insort(queue, ticket, key=lambda t: t.order)
        self.wake()

    def dequeue(self, ticket: Ticket) -> None:
        """Take it out, placed or not. Idempotent."""
        self._uncount(ticket)
        key = (ticket.pool, ticket.queue)
        queue = self._queues.get(key, [])
        if ticket in queue:
            queue.remove(ticket)
        if not queue:
            self._queues.pop(key, None)

    def _uncount(self, ticket: Ticket) -> None:
        if ticket.counted:
            ticket.counted = False
            self._counted[ticket.queue] -= 1

    def _pump(self) -> None:
        """One turn for each queue, the one with the oldest head first."""
        self._waking = None
        stopped: set[str] = set()
        for (pool, context_class), queue in sorted(self._queues.items(), key=lambda item: item[1][0].order):
            if pool not in stopped and not self._serve(queue):
                stopped.add(pool)
            if not queue:
                del self._queues[pool, context_class]

    def _serve(self, queue: list[Ticket]) -> bool:
        """Place whom there is room for; False when somebody has waited too long to be passed."""
        misses = 0
        for ticket in list(queue):
            if ticket.take_turn():
                queue.remove(ticket)
                self._uncount(ticket)
                self._placements.append(self._clock())
                continue
            if self._clock() - ticket.since > PATIENCE_S:
                return False
            misses += 1
            if misses >= LOOK_AHEAD:
                break
        return True

    def _retry_after(self, context_class: str) -> float:
        """Seconds until the queue is likely to have moved on, at the pace of the last placements."""
        low, high = RETRY_AFTER_S
        if len(self._placements) < 2:
            return low
        pace = len(self._placements) / max(1e-3, self._clock() - self._placements[0])
        return min(high, max(low, self._counted[context_class] / pace))
