"""Chooses which ranks have a second copy of a busy expert, and which rows each copy computes.

Knows nothing of weights, processes or time. Every rank keeps its own experts for ever; ``spare`` places per rank
and layer hold copies of other ranks' experts, as expert load balancers do
(https://github.com/deepseek-ai/EPLB). Rows are dealt by their numbers within a step, in sixteenths, so that who
computes a row never depends on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import msgspec

from baton.engine.program.rank_program import Rank

SHARES = 16  # parts that an expert's rows are dealt in (kernels/moe/own_experts.h: EXPERT_SHARES)
# Consecutive rows go to different copies, because a step of answers has few rows.
ORDER = (0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15)
EMPTY = -1  # in a spare place


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """Says what one layer's spare places hold, and which rank computes an expert's rows of a number.

    ``held`` names, by rank, the expert in each spare place, or EMPTY. ``owners`` is (experts, SHARES) bytes: the
    rank that computes the rows whose number, modulo SHARES, is the second index.
    """

    held: tuple[tuple[int, ...], ...]
    owners: bytes

    @classmethod
    def at_home(cls, experts: int, ranks: int, spare: int) -> Placement:
        """Returns the placement without any copy."""
        homes = home_ranks(experts, ranks)
        return cls(((EMPTY,) * spare,) * ranks, bytes(home for home in homes for _ in range(SHARES)))

    def shares(self, expert: int) -> dict[int, int]:
        """Returns, by rank, how many sixteenths of the rows of ``expert`` it computes."""
        own = self.owners[expert * SHARES : (expert + 1) * SHARES]
        return {rank: own.count(rank) for rank in sorted(set(own))}

    def loads(self, rows: Sequence[int]) -> list[float]:
        """Returns the rows that each rank computes if ``rows`` go to the experts."""
        found = [0] * len(self.held)
        for expert, count in enumerate(rows):
            for rank, share in self.shares(expert).items():
                found[rank] += count * share
        return [load / SHARES for load in found]

    def copies(self) -> int:
        """Returns the number of copies that compute rows."""
        homes = enumerate(home_ranks(len(self.owners) // SHARES, len(self.held)))
        return sum(rank != home for expert, home in homes for rank in self.shares(expert))


def home_ranks(experts: int, ranks: int) -> tuple[int, ...]:
    """Returns the rank that always has each expert."""
    ranges = (Rank(index, ranks).experts(experts) for index in range(ranks))
    return tuple(index for index, (begin, end) in enumerate(ranges) for _ in range(begin, end))


def place(rows: Sequence[int], spare: int, before: Placement) -> Placement:
    """Returns the placement for ``rows`` (by expert) with ``spare`` places per rank; copies stay where they are in
    ``before`` if they are still wanted.

    No rank's load is above the busiest one's without copies. If places don't run out, the busiest and the idlest
    rank differ by a sixteenth of the busiest expert's rows at most.
    """
    dealt = _Dealt(rows, len(before.held), spare)
    while dealt.relieve():
        pass
    held = tuple(_arranged(old, new) for old, new in zip(before.held, dealt.held(), strict=True))
    return Placement(held, b"".join(_owners(expert, shares) for expert, shares in enumerate(dealt.shares)))


class _Dealt:
    """Holds each expert's sixteenths by rank while they are dealt. Loads count sixteenths of rows."""

    def __init__(self, rows: Sequence[int], ranks: int, spare: int) -> None:
        self._rows, self._spare, self._ranks = rows, spare, ranks
        self._homes = home_ranks(len(rows), ranks)
        self.shares = [{home: SHARES} for home in self._homes]
        self._loads = [0] * ranks
        for home, count in zip(self._homes, rows, strict=True):
            self._loads[home] += SHARES * count
        self._copies = [set[int]() for _ in range(ranks)]
        self._on = [{e for e, own in enumerate(self._homes) if own == rank} for rank in range(ranks)]

    def held(self) -> list[set[int]]:
        """Returns the experts of which each rank needs a copy."""
        return self._copies

    def relieve(self) -> bool:
        """Moves rows of one expert from the busiest rank to a less busy one; returns False if none can take any."""
        busiest = max(range(self._ranks), key=lambda rank: (self._loads[rank], -rank))
        for idle in sorted(range(self._ranks), key=lambda rank: (self._loads[rank], rank)):
            found = max((self._movable(expert, busiest, idle) for expert in self._on[busiest]), default=None)
            if found is not None and found[0] > 0:
                self._move(-found[1], found[2], busiest, idle)
                return True
        return False

    def _movable(self, expert: int, source: int, target: int) -> tuple[int, int, int]:
        """Returns the load that may move, the negative number of the expert, and its sixteenths."""
        share, count = self.shares[expert][source], self._rows[expert]
        if not count or source == target or not self._has_room(expert, target):
            return 0, -expert, 0
        # Half of the difference, to the nearest share that leaves the target less than the source had.
        sixteenths = min(share, (self._loads[source] - self._loads[target] + count - 1) // (2 * count))
        return sixteenths * count, -expert, sixteenths

    def _has_room(self, expert: int, rank: int) -> bool:
        own = self._homes[expert] == rank or expert in self._copies[rank]
        return own or len(self._copies[rank]) < self._spare

    def _move(self, expert: int, sixteenths: int, source: int, target: int) -> None:
        shares = self.shares[expert]
        shares[source] -= sixteenths
        shares[target] = shares.get(target, 0) + sixteenths
        self._loads[source] -= sixteenths * self._rows[expert]
        self._loads[target] += sixteenths * self._rows[expert]
        if not shares[source]:
            del shares[source]
            self._copies[source].discard(expert)
            self._on[source].discard(expert)
        self._on[target].add(expert)
        if target != self._homes[expert]:
            self._copies[target].add(expert)


def _arranged(before: tuple[int, ...], wanted: set[int]) -> tuple[int, ...]:
    """Returns what the spare places hold: wanted copies stay in their places, others take the place of those that
    nobody wants.
    """
    new = iter(sorted(wanted - set(before)))
    free = sorted((at for at, expert in enumerate(before) if expert not in wanted), key=lambda at: before[at] >= 0)
    found = list(before)
    for at, expert in zip(free, new, strict=False):
        found[at] = expert
    return tuple(found)


def _owners(expert: int, shares: dict[int, int]) -> bytes:
    """Returns the ranks by number of row; another expert's begin with another number, because a step may have one
    row only.
    """
    dealt = [rank for rank in sorted(shares) for _ in range(shares[rank])]
    found = bytearray(SHARES)
    for at, rank in zip(ORDER, dealt, strict=True):
        found[(at + expert) % SHARES] = rank
    return bytes(found)


def changed(before: Placement, after: Placement) -> tuple[tuple[int, int], ...]:
    """Returns (expert, rank) of each copy that ``after`` has to be given."""
    places = product(range(len(after.held)), range(len(after.held[0])))
    return tuple(
        (after.held[rank][at], rank) for rank, at in places if after.held[rank][at] != before.held[rank][at]
    )
