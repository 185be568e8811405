"""The router's queue: who waits, in what order, when somebody may be placed, and who is refused.

Knows nothing of workers or policies: a ticket comes with an attempt, a function that places its request and
returns the placement, or None when there is no room now. One event loop, no locks.

    join ──> [class queue, by fair share and priority] ── attempt() is not None ──> placed
                   ^                                                              │
                   └───────── wait() again: the old place (worker lost, full) ────┘

Fair shares are start-time fair queueing (Goyal, Vin, Cheng 1996): a tenant's next request begins where its last one
ends in virtual time, which advances with the work that is placed; work is divided by the tenant's weight. A level
of priority is worth LEVEL_WORK of virtual time, so that nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter, deque
from collections.abc import Callable

from baton.protos.errors import Draining, Overloaded
from baton.router.dispatch.throttle import Throttle
from baton.router.dispatch.ticket import Load, Ticket, load_of

__all__ = ["Admission", "Load", "Ticket", "load_of"]

LOOK_AHEAD = 8  # tickets of a queue that are tried when those before them find no room
PATIENCE_S = 2.0  # a ticket that waited longer is passed by nobody of its pool
RETRY_AFTER_S = (1.0, 60.0)
LEVEL_WORK = 65_536.0
ENOUGH = 8  # placements in a row, with others waiting, that make a pace
PACED = 64


class Admission:
    """Bounded queues, one per pool (model) and context class. ``wake`` it when something may have made room."""

    def __init__(
        self,
        max_queue: int,
        clock: Callable[[], float],
        throttle: Throttle | None = None,
        max_inflight_bytes: int = 1 << 62,
    ) -> None:
        self._max_queue, self._clock, self._max_bytes = max_queue, clock, max_inflight_bytes
        self._throttle = throttle or Throttle(clock)
        self._queues: dict[tuple[str, str], list[Ticket]] = {}
        self._joined: dict[str, list[Ticket]] = {}
        self._counted: Counter[str] = Counter()
        self._work: Counter[str] = Counter()
        self._arrivals = itertools.count()
        self._placements: deque[tuple[float, float]] = deque(maxlen=PACED)
        self._virtual: Counter[str] = Counter()
        self._last: dict[tuple[str, str], float] = {}
        self._bytes = 0
        self._waking: asyncio.Handle | None = None
        self._closed = False

    def join(self, pool: str, context_class: str, load: Load = Load()) -> Ticket:
        """A place in its class, by fair share. Raises Overloaded, and Draining after ``close``.

        A full class gives up its least valuable ticket, which may be the newcomer. One that would wait longer than
        its SLO allows is refused at once, with the time after which it would not.
        """
        if self._closed:
            raise Draining("the router is shutting down; send the request to another one")
        if self._bytes + load.size > self._max_bytes:
            raise Overloaded(
                f"requests in flight hold {self._bytes} bytes of router.max_inflight_bytes; try again later",
                retry_after_s=self._retry_after(context_class),
            )
        self._refuse_late(pool, context_class, load)
        ticket: Ticket = Ticket(self, pool, context_class, self._order(pool, load), self._clock(), load)
        if self._counted[context_class] >= self._max_queue:
            self._make_room(ticket)
        self._count(ticket)
        return ticket

    def beside(self, ticket: Ticket) -> Ticket:
        """A second place next to ``ticket`` (another choice of its request); it doesn't fill the queue."""
        return Ticket(self, ticket.pool, ticket.queue, ticket.order, self._clock(), ticket.load)

    def waiting(self, context_class: str) -> int:
        """Requests of the class that were not placed yet."""
        return self._counted[context_class]

    @property
    def queued(self) -> int:
        """Of every class."""
        return sum(self._counted.values())

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
        if _remove(queue, ticket) and not queue:
            self._queues.pop(key, None)

    def let_go(self, ticket: Ticket) -> None:
        """Its request is over. Idempotent."""
        self._bytes -= ticket.held_bytes
        ticket.held_bytes = 0

    # ---- who may come in -----------------------------------------------------------------------------

    def _order(self, pool: str, load: Load) -> tuple[float, int]:
        """Where its share of the pool's work begins, moved by its priority; then by arrival."""
        begin = max(self._virtual[pool], self._last.get((pool, load.tenant), 0.0))
        self._last[pool, load.tenant] = begin + load.work / load.weight
        return begin + load.priority * LEVEL_WORK, next(self._arrivals)

    def _refuse_late(self, pool: str, context_class: str, load: Load) -> None:
        if not load.slo_ttft_s:
            return
        wait, budget = self._wait_s(pool), self._throttle.queue_budget(context_class, load.slo_ttft_s)
        if wait > budget:
            raise Overloaded(
                f"it would wait {wait:.2f} s, and {budget:.2f} s keep the {load.slo_ttft_s:g} s to the first token",
                retry_after_s=max(0.1, wait - budget),
            )

    def _make_room(self, newcomer: Ticket) -> None:
        """The least valuable of a full class gives way: the last in order, of whatever pool."""
        error = Overloaded(
            f"{self._max_queue} {newcomer.queue} requests wait already; try again later",
            retry_after_s=self._retry_after(newcomer.queue),
        )
        last = self._joined[newcomer.queue][-1]
        if last.order < newcomer.order:
            raise error
        last.shed(error)
        self.dequeue(last)

    def _wait_s(self, pool: str) -> float:
        """Seconds that a newcomer would wait, at the pace of the last placements; 0 when there is no queue."""
        if len(self._placements) < ENOUGH:
            return 0.0
        elapsed = max(1e-3, self._clock() - self._placements[0][0])
        return self._work[pool] / (sum(work for _, work in self._placements) / elapsed)

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
        self._work[ticket.pool] += ticket.load.work  # type: ignore[assignment]
        self._bytes += ticket.held_bytes
        bisect.insort(self._joined.setdefault(ticket.queue, []), ticket, key=lambda t: t.order)

    def _uncount(self, ticket: Ticket) -> None:
        if ticket.counted:
            ticket.counted = False
            self._counted[ticket.queue] -= 1
            self._work[ticket.pool] -= ticket.load.work  # type: ignore[assignment]
            _remove(self._joined[ticket.queue], ticket)
            if not self._counted[ticket.queue] and not any(self._counted.values()):
                self._idle()

    def _idle(self) -> None:
        """Nobody waits: shares and pace begin anew (a pace without a queue would be the clients', not ours).

        Virtual time only moves on: a ticket that will wait again keeps its place before all that come later.
        """
        self._placements.clear()
        self._work.clear()
        for (pool, _), last in self._last.items():
            self._virtual[pool] = max(self._virtual[pool], last)  # type: ignore[assignment]
        self._last.clear()

    # ---- who is placed -------------------------------------------------------------------------------

    def _pump(self) -> None:
        """One turn for each queue, the one whose head comes first, first."""
        self._waking = None
        stopped: set[str] = set()
        for (pool, context_class), queue in sorted(self._queues.items(), key=lambda item: item[1][0].order):
            if pool not in stopped and not self._serve(queue):
                stopped.add(pool)
            if not queue:
                del self._queues[pool, context_class]

    def _serve(self, queue: list[Ticket]) -> bool:
        """Place whom there is room for; False when somebody has waited too long to be passed."""
        misses, at = 0, 0
        while at < len(queue):
            ticket = queue[at]
            if self._is_late(ticket) or ticket.take_turn():
                del queue[at]
                self._placed(ticket)
                continue
            if self._clock() - ticket.since > PATIENCE_S:
                return False
            misses, at = misses + 1, at + 1
            if misses >= LOOK_AHEAD:
                break
        return True

    def _is_late(self, ticket: Ticket) -> bool:
        """Its first token could no longer come in time: it gives way to those that can be served well."""
        slo = ticket.load.slo_ttft_s
        if not slo or not ticket.counted:
            return False
        waited = self._clock() - ticket.since
        if waited <= self._throttle.queue_budget(ticket.queue, slo):
            return False
        ticket.shed(Overloaded(f"it waited {waited:.2f} s of its {slo:g} s", retry_after_s=max(0.1, waited)))
        return True

    def _placed(self, ticket: Ticket) -> None:
        if ticket.counted and ticket._refusal is None:
            begin = ticket.order[0] - ticket.load.priority * LEVEL_WORK
            self._virtual[ticket.pool] = max(self._virtual[ticket.pool], begin)  # type: ignore[assignment]
            self._placements.append((self._clock(), ticket.load.work))
        self._uncount(ticket)


def _remove(queue: list[Ticket], ticket: Ticket) -> bool:
    """Take it out of a list that is in order; False when it isn't there."""
    at = bisect.bisect_left(queue, ticket.order, key=lambda t: t.order)
    while at < len(queue) and queue[at].order == ticket.order:
        if queue[at] is ticket:
            del queue[at]
            return True
        at += 1
    return False
