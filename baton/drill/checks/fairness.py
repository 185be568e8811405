"""Checks that a router places the work of two tenants by their weights while both of them wait.

The bound is that of start-time fair queueing (Goyal, Vin, Cheng 1996): over any time in which two tenants both
wait, the work that is placed for them, divided by their weights, differs by at most one largest request of each.
The queue may also pass over up to LOOK_AHEAD requests that find no room. A tenant waits, too, that a full queue
refused and that asks again soon. Knows nothing of how the queue is kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

import msgspec

from baton.router.dispatch.fair_queue import LOOK_AHEAD

SLACK = 2 + LOOK_AHEAD  # largest requests by which two tenants' shares may differ
AGAIN_S = 0.2  # seconds within which a tenant that was refused asks again if it still wants to be served


class Wait(msgspec.Struct):
    """The time that one request waits for a place on workers; times are loop time in seconds."""

    router: int  # index of the router
    tenant: str
    work: int  # tokens
    asked: float  # when the client asked
    came: float  # when the wait began: once it can be told that there was no room at once
    ended: float | None = None  # None: it still waits
    placed: bool = False  # False at the end: its client left without a place
    weight: float = 1.0  # of the tenant
    model: int = 0  # index of the model
    refused: bool = False  # for want of room

    @property
    def share(self) -> float:
        """Returns the work by the tenant's weight."""
        return self.work / self.weight


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

    def refused(self, number: int) -> None:
        """Stores that request ``number`` found a full queue."""
        if (wait := self._waits.get(number)) is not None:
            wait.refused = True

    def unfair(self) -> Iterator[str]:
        """Yields a message for each router, model and pair of tenants whose placed work, by their weights, differs
        by more than the bound.
        """
        by_pool: defaultdict[tuple[int, int], list[Wait]] = defaultdict(list)
        for wait in self._waits.values():
            by_pool[wait.router, wait.model].append(wait)
        for (router, _), waits in by_pool.items():
            for a, b in combinations(sorted({wait.tenant for wait in waits}), 2):
                both = [wait for wait in waits if wait.tenant in (a, b)]
                apart, largest = spread(both, a), max(wait.share for wait in both)
                if apart > SLACK * largest:
                    yield (
                        f"router-{router}: {apart:g} tokens by their weights between tenants {a} and {b}, over "
                        f"{SLACK} of {largest:g}"
                    )


def spread(waits: list[Wait], first: str) -> float:
    """Returns by how many tokens, divided by its weight, one of two tenants got further ahead of the other at most
    while both waited.

    ``waits`` are those of the two tenants at one router; ``first`` names either. Who is ahead is counted from when
    both have asked, with what finds room on arrival; so a tenant that was behind may catch up.
    """
    events = [(wait.asked, 0, wait) for wait in waits] + [(wait.came, 1, wait) for wait in waits]
    events += [(wait.ended, 2, wait) for wait in waits if wait.ended is not None]
    for begin, end, wait in _refusals(waits):
        events += [(begin, -1, wait), (end, 3, wait)]
    asked: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    lead = Lead()
    for at, what, wait in sorted(events, key=lambda event: event[:2]):
        if what == 0:
            asked[wait.tenant] += 1
        elif what == 1:
            waiting[wait.tenant] += wait.ended is None or wait.ended > at
        elif what != 2:
            asked[wait.tenant] += 1 if what < 0 else -1
            waiting[wait.tenant] += 1 if what < 0 else -1
        else:
            waited = at > wait.came
            if wait.placed and len(+asked) == 2:
                lead.placed(wait.share if wait.tenant == first else -wait.share, waited and len(+waiting) == 2)
            asked[wait.tenant] -= 1
            waiting[wait.tenant] -= waited
        if len(+asked) < 2:
            lead.begin_anew()
    return lead.widest


def _refusals(waits: list[Wait]) -> Iterator[tuple[float, float, Wait]]:
    """Yields the times through which tenants wait although they were refused: until they ask again."""
    asked: defaultdict[str, list[Wait]] = defaultdict(list)
    for wait in sorted(waits, key=lambda wait: wait.asked):
        asked[wait.tenant].append(wait)
    for wait in waits:
        if wait.refused and wait.ended is not None:
            again = next((one for one in asked[wait.tenant] if one.asked > wait.ended), None)
            soon = again is not None and again.asked - wait.ended <= AGAIN_S
            yield wait.asked, again.came if again is not None and soon else wait.ended, wait


class Lead:
    """Counts the work by which one of two tenants is ahead, and ``widest``, by how much that grew while both
    waited.
    """

    def __init__(self) -> None:
        self.widest = 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Sets both tenants equal."""
        self._ahead = self._least = 0.0

    def placed(self, work: float, both_wait: bool) -> None:
        """Adds ``work`` that was placed, below 0 for the second tenant."""
        before = abs(self._ahead)
        self._ahead += work
        now = abs(self._ahead)
        if not both_wait:
            self._least += max(0, now - before)
        self._least = min(self._least, now)
        self.widest = max(self.widest, now - self._least)
