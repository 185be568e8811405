"""Checks that a router places the work of two tenants fairly while both of them wait.

The bound is that of start-time fair queueing (Goyal, Vin, Cheng 1996): over any time in which two tenants of equal
weight both wait, the work that is placed for them differs by at most one largest request of each. The queue may
also pass over up to LOOK_AHEAD requests that find no room. Knows nothing of how the queue is kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

import msgspec

from baton.router.dispatch.fair_queue import LOOK_AHEAD

SLACK = 2 + LOOK_AHEAD  # largest requests by which two tenants' shares may differ


class Wait(msgspec.Struct):
    """The time that one request waits for a place on workers; times are loop time in seconds."""

    router: int  # index of the router
    tenant: str
    work: int  # tokens
    asked: float  # when the client asked
    came: float  # when the wait began: once it can be told that there was no room at once
    ended: float | None = None  # None: it still waits
    placed: bool = False  # False at the end: its client left without a place


class FairnessWitness:
    """Collects when the requests of a run waited, by request number, and finds unfair shares in that."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}

    def came(self, number: int, wait: Wait) -> None:
        """Stores that request ``number`` waits from now on."""
        self._waits[number] = wait

    def ends(self, number: int, now: float, placed: bool) -> None:
        """Stores that the wait of request ``number`` ended at ``now``, with a place or without; only the first call
        counts.
        """
        wait = self._waits.get(number)
        if wait is not None and wait.ended is None:
            wait.ended, wait.placed = now, placed

    def unfair(self) -> Iterator[str]:
        """Yields a message for each router and pair of tenants whose placed work differs by more than the bound."""
        by_router: defaultdict[int, list[Wait]] = defaultdict(list)
        for wait in self._waits.values():
            by_router[wait.router].append(wait)
        for router, waits in by_router.items():
            for a, b in combinations(sorted({wait.tenant for wait in waits}), 2):
                apart = spread([wait for wait in waits if wait.tenant in (a, b)], a)
                largest = max(wait.work for wait in waits)
                if apart > SLACK * largest:
                    yield f"router-{router}: {apart} tokens between tenants {a} and {b}, over {SLACK} of {largest}"


def spread(waits: list[Wait], first: str) -> int:
    """Returns by how many tokens one of two tenants got further ahead of the other at most, while both waited.

    ``waits`` are those of the two tenants at one router; ``first`` names either. Who is ahead is counted from when
    both have asked, with what finds room on arrival; so a tenant that was behind may catch up.
    """
    events = [(wait.asked, 0, wait) for wait in waits] + [(wait.came, 1, wait) for wait in waits]
    events += [(wait.ended, 2, wait) for wait in waits if wait.ended is not None]
    asked: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    lead = Lead()
    for at, what, wait in sorted(events, key=lambda event: event[:2]):
        if what == 0:
            asked[wait.tenant] += 1
        elif what == 1:
            waiting[wait.tenant] += wait.ended is None or wait.ended > at
        else:
            waited = at > wait.came
            if wait.placed and len(+asked) == 2:
                lead.placed(wait.work if wait.tenant == first else -wait.work, waited and len(+waiting) == 2)
            asked[wait.tenant] -= 1
            waiting[wait.tenant] -= waited
        if len(+asked) < 2:
            lead.begin_anew()
    return lead.widest


class Lead:
    """Counts the work by which one of two tenants is ahead, and ``widest``, by how much that grew while both
    waited.
    """

    def __init__(self) -> None:
        self.widest = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Sets both tenants equal."""
        self._ahead = self._least = 0

    def placed(self, work: int, both_wait: bool) -> None:
        """Adds ``work`` that was placed, below 0 for the second tenant."""
        before = abs(self._ahead)
        self._ahead += work
        now = abs(self._ahead)
        if not both_wait:
            self._least += max(0, now - before)
        self._least = min(self._least, now)
        self.widest = max(self.widest, now - self._least)
