"""Holds what tenants get of a router's places against fair shares, while two of them wait at once.

The bound is that of start-time fair queueing (Goyal, Vin, Cheng 1996): over any time in which two tenants of equal
weight both wait, the work that is placed for them differs by no more than one largest request of each. The queue
may pass over a head that finds no room, by LOOK_AHEAD requests at most. Knows nothing of how the queue is kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

import msgspec

from baton.router.dispatch.fair_queue import LOOK_AHEAD

SLACK = 2 + LOOK_AHEAD  # largest requests by which two tenants' shares may differ


class Wait(msgspec.Struct):
    """A request's wait: whose it is, its work in tokens, and when it came, was placed, or left without a place."""

    router: int
    tenant: str
    work: int
    came: float
    ended: float | None = None
    placed: bool = False


class FairnessWitness:
    """Collects the waits of a run, by the requests' numbers."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}

    def came(self, number: int, wait: Wait) -> None:
        """Notes a request that waits from now on."""
        self._waits[number] = wait

    def ends(self, number: int, now: float, placed: bool) -> None:
        """Notes that a request is placed, or waits no more; only the first word on it counts."""
        wait = self._waits.get(number)
        if wait is not None and wait.ended is None:
            wait.ended, wait.placed = now, placed

    def unfair(self) -> Iterator[str]:
        """Yields what is wrong, in words: a router and two tenants whose shares differ by more than the bound."""
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
    """Returns the most by which two tenants' placed work differs over any time in which both wait."""
    events = [(wait.came, 0, wait) for wait in waits]
    events += [(wait.ended, 1, wait) for wait in waits if wait.ended is not None]
    waiting: Counter[str] = Counter()
    widest = apart = low = high = 0
    for _, ends, wait in sorted(events, key=lambda event: event[:2]):
        both = len(+waiting) == 2
        if ends and wait.placed and both:
            apart += wait.work if wait.tenant == first else -wait.work
            low, high = min(low, apart), max(high, apart)
            widest = max(widest, high - low)
        waiting[wait.tenant] += -1 if ends else 1
        if len(+waiting) < 2:
            apart = low = high = 0
    return widest
