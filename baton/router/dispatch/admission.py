"""The router's queue: who waits, when somebody may be placed, and who is refused. ``fair_queue`` holds the order.

Knows nothing of workers or policies: a ticket comes with an attempt, a function that places its request and
returns the placement, or None when there is no room now. One event loop, no locks.

    join ──> [class queue, by fair share and priority] ── attempt() is not None ──> placed
                   ^                                      ^                       │
                   │                 before all others: leased, prefill again ────┤
                   └───────── wait() again: the old place (worker lost, full) ────┘
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from itertools import chain, takewhile

from baton.protos.errors import Draining, Overloaded
from baton.router.dispatch.fair_queue import FairQueue, FairShares, Place, RequestLoad, insert, remove
from baton.router.dispatch.throttle import Throttle
from baton.router.dispatch.ticket import Ticket, load_of

__all__ = ["Admission", "RequestLoad", "Ticket", "load_of"]

RETRY_AFTER_S = (1.0, 60.0)  # seconds: least and most that a refused client is told to wait
ENOUGH = 8  # placements in a row, with others waiting, that make a pace
PACED = 64  # last placements by which the queue's pace is estimated


class Admission:
    """Keeps the bounded queues of requests that wait for a worker, one per pool (model) and context class.

    Call ``wake`` when something may have made room. ``max_queue`` limits each context class of a pool,
    ``max_inflight_bytes`` the estimated bytes of all requests in flight.
    """

    def __init__(
        self,
        max_queue: int,
        clock: Callable[[], float],
        throttle: Throttle | None = None,
        max_inflight_bytes: int = 1 << 62,
    ) -> None:
        self._max_queue, self._clock, self._max_bytes = max_queue, clock, max_inflight_bytes
        self._throttle = throttle or Throttle(clock)
        self._queue: FairQueue[Ticket] = FairQueue()
        self._leading: dict[Ticket, None] = {}  # those that hold a decode worker's seat, which others may wait for
        self._shares = FairShares()
        self._joined: dict[tuple[str, str], list[Ticket]] = {}  # in order, by pool and class
        self._counted: Counter[str] = Counter()
        self._placements: deque[tuple[float, float]] = deque(maxlen=PACED)
        self._bytes = 0
        self._waking: asyncio.Handle | None = None
        self._closed = False

    def join(self, pool: str, context_class: str, load: RequestLoad = RequestLoad()) -> Ticket:
        """Returns a request's ticket, its place in the class's queue by fair share.

        Raises Draining after ``close``, and Overloaded if too many bytes are in flight, if the request would wait
        longer than its TTFT SLO allows, or if the class is full and the newcomer ranks last; otherwise a full class
        sheds its last ticket.
        """
        if self._closed:
            raise Draining("the router is shutting down; send the request to another one")
        if self._bytes + load.size > self._max_bytes:
            raise Overloaded(
                f"requests in flight hold {self._bytes} bytes of router.max_inflight_bytes; try again later",
                retry_after_s=self._retry_after(context_class),
            )
        ticket: Ticket = Ticket(self, pool, context_class, self._shares.order(pool, load), self._clock(), load)
        try:
            self._refuse_late(ticket)
            if len(self._joined.get((pool, context_class), ())) >= self._max_queue:
                self._make_room(ticket)
        except Overloaded:
            self._shares.refund(pool, Place(ticket.order, load))
            raise
        self._count(ticket)
        return ticket

    def beside(self, ticket: Ticket) -> Ticket:
        """Returns a ticket with the same place as ``ticket``, for another choice of its request; it isn't counted
        in the queue.
        """
        return Ticket(self, ticket.pool, ticket.queue, ticket.order, self._clock(), ticket.load)

    def waiting(self, context_class: str) -> int:
        """Returns the number of requests of the class that are not placed on workers yet."""
        return self._counted[context_class]

    @property
    def queued(self) -> int:
        """Returns the number of requests of all classes that are not placed on workers yet."""
        return sum(self._counted.values())

    @property
    def held_bytes(self) -> int:
        """Returns the estimated bytes that requests in flight hold."""
        return self._bytes

    def close(self) -> None:
        """Makes ``join`` raise Draining from now on."""
        self._closed = True

    def wake(self) -> None:
        """Schedules one attempt to place waiting requests, because something may have made room."""
        if self._waking is None and (self._leading or self._queue):
            self._waking = asyncio.get_running_loop().call_soon(self._pump)

    # ---- for tickets ---------------------------------------------------------------------------------

    def enqueue(self, ticket: Ticket, leads: bool = False) -> None:
        """Puts a ticket into the queue at its place, or with ``leads`` before all others, and schedules an attempt
        to place it.
        """
        if leads:
            self._leading[ticket] = None
        else:
            self._queue.add(ticket)
        self.wake()

    def dequeue(self, ticket: Ticket) -> None:
        """Takes a ticket out of the queue and of the counts, placed or not. Idempotent."""
        self._uncount(ticket)
        self._leading.pop(ticket, None)
        self._queue.remove(ticket)

    def let_go(self, ticket: Ticket) -> None:
        """Subtracts the bytes of a ticket's request from those in flight. Idempotent."""
        self._bytes -= ticket.held_bytes
        ticket.held_bytes = 0

    # ---- who may come in -----------------------------------------------------------------------------

    def _refuse_late(self, newcomer: Ticket) -> None:
        slo = newcomer.load.slo_ttft_s
        if not slo:
            return
        wait, budget = self._wait_s(newcomer), self._throttle.queue_budget(newcomer.queue, slo)
        if wait > budget:
            raise Overloaded(
                f"it would wait {wait:.2f} s in the queue; more than {budget:.2f} s would miss the "
                f"{slo:g} s that its first token may take (its own SLO or its class's)",
                retry_after_s=max(0.1, wait - budget),
            )

    def _make_room(self, newcomer: Ticket) -> None:
        """The least valuable of a pool's full class gives way: the last in order."""
        error = Overloaded(
            f"the queue of context class {newcomer.queue!r} for {newcomer.pool!r} is full "
            f"({self._max_queue} requests, router.max_queue); try again later",
            retry_after_s=self._retry_after(newcomer.queue),
        )
        last = self._joined[newcomer.pool, newcomer.queue][-1]
        if last.order < newcomer.order:
            raise error
        last.shed(error)
        self.dequeue(last)

    def _wait_s(self, newcomer: Ticket) -> float:
        """Seconds until those before a newcomer in order are placed, at the pace of the last placements; 0 when
        there is no queue. What a flood has queued behind it doesn't count.
        """
        if len(self._placements) < ENOUGH:
            return 0.0
        elapsed = max(1e-3, self._clock() - self._placements[0][0])
        return self._work_before(newcomer) / (sum(work for _, work in self._placements) / elapsed)

    def _work_before(self, newcomer: Ticket) -> float:
        queues = (waiting for (pool, _), waiting in self._joined.items() if pool == newcomer.pool)
        before = (takewhile(lambda other: other.order < newcomer.order, waiting) for waiting in queues)
        return sum(other.load.work for other in chain.from_iterable(before))

    def _retry_after(self, context_class: str) -> float:
        """Seconds until the class is likely to have emptied, at the pace of the last placements."""
        low, high = RETRY_AFTER_S
        if len(self._placements) < 2:
            return low
        pace = len(self._placements) / max(1e-3, self._clock() - self._placements[0][0])
        return min(high, max(low, self._counted[context_class] / pace))

    def _count(self, ticket: Ticket) -> None:
        ticket.counted, ticket.held_bytes = True, ticket.load.size
        self._counted[ticket.queue] += 1
        self._bytes += ticket.held_bytes
        insert(self._joined.setdefault((ticket.pool, ticket.queue), []), ticket)

    def _uncount(self, ticket: Ticket, placed: bool = False) -> None:
        if ticket.counted:
            ticket.counted = False
            if not placed:
                self._shares.refund(ticket.pool, Place(ticket.order, ticket.load))
            self._counted[ticket.queue] -= 1
            joined = self._joined[ticket.pool, ticket.queue]
            remove(joined, ticket)
            if not joined:
                del self._joined[ticket.pool, ticket.queue]
            if not self._counted[ticket.queue] and not any(self._counted.values()):
                self._idle()

    def _idle(self) -> None:
        """Nobody waits: shares and pace begin anew (a pace without a queue would be the clients', not ours)."""
        self._placements.clear()
        self._shares.idle()

    # ---- who is placed -------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._waking = None
        for ticket in list(self._leading):
            if self._attempt(ticket):
                self._leading.pop(ticket, None)
        self._queue.pump(self._clock(), self._attempt)

    def _attempt(self, ticket: Ticket) -> bool:
        """Places a ticket whose turn has come; returns whether its wait is over, also because it came too late."""
        if not self._is_late(ticket) and not ticket.take_turn():
            return False
        self._placed(ticket)
        return True

    def _is_late(self, ticket: Ticket) -> bool:
        """Returns whether the first token can't come in time any more, so that others are served first."""
        slo = ticket.load.slo_ttft_s
        if not slo or not ticket.counted:
            return False
        waited = self._clock() - ticket.since
        if waited <= self._throttle.queue_budget(ticket.queue, slo):
            return False
        text = f"no worker was free within the {slo:g} s that its first token may take (its own SLO or its class's)"
        ticket.shed(Overloaded(text, retry_after_s=max(0.1, waited)))
        return True

    def _placed(self, ticket: Ticket) -> None:
        placed = ticket._refusal is None
        if ticket.counted and placed:
            waiting = self._joined[ticket.pool, ticket.queue]
            first = next((Place(other.order, other.load) for other in waiting if other is not ticket), None)
            self._shares.placed(ticket.pool, Place(ticket.order, ticket.load), first)
            self._placements.append((self._clock(), ticket.load.work))
        self._uncount(ticket, placed)
