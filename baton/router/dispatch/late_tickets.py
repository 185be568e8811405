"""Which waiting requests of a queue can have their first tokens in time no more.

Knows nothing of order, workers or errors. A request that waited longer than its budget is late, and its budget is
what the measured ``service`` time leaves of its SLO, ``least`` of the SLO in any case. So it is late once two
moments have passed: ``since + least * slo``, which is known as it comes, and ``since + slo - service``, which moves
with the pace. A heap for each finds all who are late at O(log n) per request, over its whole wait.
"""

from __future__ import annotations

import heapq
from itertools import count

from baton.router.dispatch.ticket import Ticket

SLACK = 64  # entries of tickets that have left, which are kept at least

_Heap = list[tuple[float, int, Ticket]]  # a moment in seconds, the order of coming, and who


class LateTickets:
    """Keeps the waiting tickets of one queue that have an SLO, by when they are late; ``least`` is a share of the
    SLO.
    """

    def __init__(self, least: float) -> None:
        self._least, self._serial = least, count()
        self._early: _Heap = []  # by the moment before which none is late, however slow answers were
        self._late: _Heap = []  # of those who are past that, by the moment at which their SLO is over
        self._waiting: set[Ticket] = set()

    def __bool__(self) -> bool:
        """Returns whether any ticket with an SLO waits."""
        return bool(self._waiting)

    def add(self, ticket: Ticket) -> None:
        """Adds a ticket that waits from now on; one without an SLO is never late."""
        if slo := ticket.load.slo_ttft_s:
            self._waiting.add(ticket)
            heapq.heappush(self._early, (ticket.since + self._least * slo, next(self._serial), ticket))

    def remove(self, ticket: Ticket) -> None:
        """Takes out a ticket that no longer waits. Idempotent."""
        self._waiting.discard(ticket)
        if len(self._early) + len(self._late) > 2 * len(self._waiting) + SLACK:
            self._early, self._late = map(self._still, (self._early, self._late))

    def take(self, now: float, service_s: float) -> list[Ticket]:
        """Takes out and returns the tickets that are late at ``now``; ``service_s`` is what the way behind the
        queue takes.
        """
        for ticket in self._passed(self._early, now):
            slo_over = ticket.since + ticket.load.slo_ttft_s
            heapq.heappush(self._late, (slo_over, next(self._serial), ticket))
        found = self._passed(self._late, now + service_s)
        self._waiting.difference_update(found)
        return found

    def _passed(self, heap: _Heap, now: float) -> list[Ticket]:
        found = list[Ticket]()
        while heap and heap[0][0] < now:
            ticket = heapq.heappop(heap)[2]
            if ticket in self._waiting:
                found.append(ticket)
        return found

    def _still(self, heap: _Heap) -> _Heap:
        still = [entry for entry in heap if entry[2] in self._waiting]
        heapq.heapify(still)
        return still
