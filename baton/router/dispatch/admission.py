"""The router's queue: who waits, when somebody may be placed, and who is refused. ``fair_queue`` holds the order.

Knows nothing of workers or policies: a ticket comes with an attempt, a function that places its request and
returns the placement, or None when there is no room now. One event loop, no locks.

    join ──> [class queue, by fair share and priority] ── attempt() is not None ──> placed
                   ^                                      ^                       │
                   │                 before all others: leased, prefill again ────┤
                   └───────── wait() again: the old place (worker lost, full) ────┘

A request that no worker could take now, as none that is left can load its adapter, waits aside and holds nobody
back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from baton.protos.errors import Draining, Overloaded, RequestTooLarge
from baton.router.dispatch.fair_queue import FairQueue, FairShares, Place, RequestLoad
from baton.router.dispatch.held_bytes import HeldBytes
from baton.router.dispatch.pool_queue import PoolQueue
from baton.router.dispatch.throttle import Throttle
from baton.router.dispatch.ticket import Ticket, load_of

__all__ = ["Admission", "RequestLoad", "Ticket", "load_of"]

RETRY_AFTER_S = (1.0, 60.0)  # seconds: least and most that a refused client is told to wait
ASIDE_S = 0.05  # seconds until one that no worker could take is tried again


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
        self._max_queue, self._clock, self._bytes = max_queue, clock, HeldBytes(max_inflight_bytes)
        self._throttle = throttle or Throttle(clock)
        self._queue: FairQueue[Ticket] = FairQueue()
        self._leading: dict[Ticket, None] = {}  # those that hold a decode worker's seat, which others may wait for
        self._aside: dict[Ticket, None] = {}  # those that no worker could take when they were tried last
        self._tried_aside = float("-inf")
        self._shares = FairShares()
        self._pools: dict[str, PoolQueue] = {}  # of those in which somebody waits
        self._counted: Counter[str] = Counter()
        self._waking: asyncio.Handle | None = None
        self._closed = False

    def join(self, pool: str, context_class: str, load: RequestLoad = RequestLoad()) -> Ticket:
        """Returns a request's ticket, its place in the class's queue by fair share.

        Raises Draining after ``close``, RequestTooLarge if the request could never be held, and Overloaded if it
        would wait longer than its TTFT SLO allows, if the class is full and the newcomer ranks last, or if too many
        bytes are in flight and no other tenant's waiting requests hold more. Otherwise a full class sheds its last
        ticket, and that tenant its youngest.
        """
        if self._closed:
            raise Draining("the router is shutting down; send the request to another one")
        self._require_holdable(load)
        ticket: Ticket = Ticket(self, pool, context_class, self._shares.order(pool, load), self._clock(), load)
        try:
            self._refuse_late(ticket)
            yielding = self._require_bytes(ticket)
            if pool in self._pools and self._pools[pool].waiting(context_class) >= self._max_queue:
                self._make_room(ticket)
        except Overloaded:
            self._shares.refund(pool, Place(ticket.order, load))
            if pool not in self._pools:
                self._shares.idle(pool)
            raise
        self._free_bytes(yielding)
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

    def queued_of(self, pool: str) -> int:
        """Returns the number of requests of one pool (model) that are not placed on workers yet."""
        return len(self._pools.get(pool, ()))

    @property
    def held_bytes(self) -> int:
        """Returns the estimated bytes that requests in flight hold."""
        return self._bytes.total

    def close(self) -> None:
        """Makes ``join`` raise Draining from now on."""
        self._closed = True

    def wake(self) -> None:
        """Schedules one attempt to place waiting requests, because something may have made room."""
        if self._waking is None and (self._leading or self._queue or self._aside):
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
        self._aside.pop(ticket, None)
        self._queue.remove(ticket)

    def let_go(self, ticket: Ticket) -> None:
        """Subtracts the bytes of a ticket's request from those in flight. Idempotent."""
        self._bytes.let_go(ticket)

    # ---- who may come in -----------------------------------------------------------------------------

    def _refuse_late(self, newcomer: Ticket) -> None:
        slo = newcomer.load.slo_ttft_s
        if not slo:
            return
        wait = self._pools[newcomer.pool].wait_s(newcomer.order) if newcomer.pool in self._pools else 0.0
        budget = self._throttle.queue_budget(newcomer.pool, newcomer.queue, slo)
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
            retry_after_s=self._retry_after(newcomer),
        )
        last = self._pools[newcomer.pool].last(newcomer.queue)
        if last.order < newcomer.order:
            raise error
        last.shed(error)
        self.dequeue(last)

    def _require_holdable(self, load: RequestLoad) -> None:
        """Raises RequestTooLarge for a request that would be over the limit of bytes if it were alone."""
        if load.size > self._bytes.most:
            raise RequestTooLarge(
                f"the request would hold about {load.size} bytes of prompt and answers, and all that are in flight "
                f"may hold {self._bytes.most} (router.max_inflight_bytes): shorten the prompt, ask for fewer "
                "choices (n) or lower max_tokens, or raise the limit",
                "prompt",
            )

    def _require_bytes(self, newcomer: Ticket) -> list[Ticket]:
        """Returns who has to give way so that the newcomer's bytes can be held. Raises Overloaded."""
        yielding = self._bytes.yielding(newcomer)
        if yielding is None:
            raise self._too_many_bytes(newcomer)
        return yielding

    def _free_bytes(self, yielding: list[Ticket]) -> None:
        for ticket in yielding:
            ticket.shed(self._too_many_bytes(ticket))
            self.dequeue(ticket)
            self.let_go(ticket)

    def _too_many_bytes(self, ticket: Ticket) -> Overloaded:
        return Overloaded(
            f"requests in flight hold {self._bytes.total} bytes of router.max_inflight_bytes; try again later",
            retry_after_s=self._retry_after(ticket),
        )

    def _retry_after(self, ticket: Ticket) -> float:
        """Seconds until the ticket's class of its pool is likely to have emptied, within RETRY_AFTER_S."""
        low, high = RETRY_AFTER_S
        pool = self._pools.get(ticket.pool)
        return min(high, max(low, pool.emptied_s(ticket.queue) if pool else low))

    def _count(self, ticket: Ticket) -> None:
        ticket.counted = True
        self._counted[ticket.queue] += 1
        self._bytes.take(ticket)
        if ticket.pool not in self._pools:
            self._pools[ticket.pool] = PoolQueue(self._clock)
        self._pools[ticket.pool].add(ticket)

    def _uncount(self, ticket: Ticket, placed: bool = False) -> None:
        if ticket.counted:
            ticket.counted = False
            if not placed:
                self._shares.refund(ticket.pool, Place(ticket.order, ticket.load))
            self._counted[ticket.queue] -= 1
            self._bytes.placed(ticket)
            self._pools[ticket.pool].remove(ticket)
            if not self._pools[ticket.pool]:
                self._idle(ticket.pool)

    def _idle(self, pool: str) -> None:
        """Nobody waits in a pool: shares and pace begin anew (a pace without a queue would be the clients', not
        ours).
        """
        del self._pools[pool]
        self._shares.idle(pool)

    # ---- who is placed -------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._waking = None
        self._shed_late()
        for ticket in list(self._leading):
            if self._attempt(ticket):
                self._leading.pop(ticket, None)
        self._recall()
        self._queue.pump(self._clock(), self._attempt)

    def _recall(self) -> None:
        """Puts those aside back to their places in the queue, every ASIDE_S, because there may be many."""
        now = self._clock()
        if self._aside and now - self._tried_aside >= ASIDE_S:
            self._tried_aside = now
            aside, self._aside = self._aside, {}
            for ticket in aside:
                self._queue.add(ticket)

    def _shed_late(self) -> None:
        """Refuses those whose first tokens can't come in time any more, wherever in the queue they are, so that
        they may go elsewhere and others are served first.
        """
        now, late = self._clock(), list[Ticket]()
        for name, pool in self._pools.items():
            late += pool.take_late(partial(self._throttle.service_s, name))
        for ticket in late:
            slo = ticket.load.slo_ttft_s
            text = f"no worker was free within the {slo:g} s that its first token may take"
            ticket.shed(
                Overloaded(f"{text} (its own SLO or its class's)", retry_after_s=max(0.1, now - ticket.since))
            )
            self.dequeue(ticket)

    def _attempt(self, ticket: Ticket) -> bool:
        """Places a ticket whose turn has come; returns whether it waits in the queue no longer, also because it
        goes aside.
        """
        if not ticket.take_turn():
            if ticket.none_able and ticket not in self._leading:
                self._aside[ticket] = None
                return True
            return False
        self._placed(ticket)
        return True

    def _placed(self, ticket: Ticket) -> None:
        placed = ticket._refusal is None
        if ticket.counted and placed:
            pool = self._pools[ticket.pool]
            firsts = [Place(first.order, first.load) for first in pool.firsts_but(ticket)]
            self._shares.placed(ticket.pool, Place(ticket.order, ticket.load), firsts)
            pool.placed(ticket)
        self._uncount(ticket, placed)
