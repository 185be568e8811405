"""Keeps recent answers of each tenant in suffix automata of limited size, because later answers may repeat them.

Knows nothing of drafts. A tenant's answers are used for that tenant's requests alone, because accepted drafts show
in a request's timing. Answers are read in slices, so that the end of a long one delays no step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from baton.engine.speculate.automaton import SuffixAutomaton

HALF_TOKENS = 1 << 15  # tokens of one automaton; a tenant has two: when the newer is full, the older is dropped
MOST_TOKENS = 1 << 17  # of all tenants; some 400 bytes each
MOST_WAITING = 1 << 15  # tokens of queued answers; more are dropped
GAP = -2  # separator after each answer, no token id


class Corpus:
    """Holds the answers: ``take`` queues one, ``read`` adds some of the queue to automata, ``automata`` returns a
    tenant's.

    ``half`` limits the tokens of one automaton, ``most`` those of all.
    """

    def __init__(self, half: int = HALF_TOKENS, most: int = MOST_TOKENS) -> None:
        self._half, self._most = half, most
        self._tenants: OrderedDict[bytes, list[SuffixAutomaton]] = OrderedDict()
        self._waiting: deque[tuple[bytes, deque[int]]] = deque()
        self._queued = 0

    @property
    def tokens(self) -> int:
        """Returns the number of tokens in automata and in the queue."""
        return self._queued + sum(len(part) for parts in self._tenants.values() for part in parts)

    @property
    def waiting(self) -> int:
        """Returns the number of queued tokens."""
        return self._queued

    def automata(self, tenant: bytes) -> Sequence[SuffixAutomaton]:
        """Returns the tenant's automata, at most two, the newer last."""
        return self._tenants.get(tenant, ())

    def take(self, tenant: bytes, answer: Sequence[int]) -> None:
        """Queues a finished answer; it is dropped if the queue is too long."""
        if len(answer) > 1 and self._queued + len(answer) < MOST_WAITING:
            self._waiting.append((tenant, deque((*answer, GAP))))
            self._queued += len(answer) + 1

    def read(self, most: int) -> None:
        """Adds up to ``most`` queued tokens to automata."""
        while most > 0 and self._waiting:
            tenant, answer = self._waiting[0]
            part = self._part(tenant)
            count = min(most, len(answer), max(1, self._half - len(part)))
            for _ in range(count):
                part.append(answer.popleft())
            most, self._queued = most - count, self._queued - count
            if not answer:
                self._waiting.popleft()
            self._bound(tenant)

    def _part(self, tenant: bytes) -> SuffixAutomaton:
        """Returns the automaton that the tenant's answers are added to."""
        parts = self._tenants.setdefault(tenant, [])
        self._tenants.move_to_end(tenant)
        if not parts or len(parts[-1]) >= self._half:
            parts.append(SuffixAutomaton())
            del parts[:-2]
        return parts[-1]

    def _bound(self, tenant: bytes) -> None:
        """Drops the least recently used automata beyond the limit, those of other tenants first."""
        while self.tokens - self._queued > self._most:
            oldest = next(iter(self._tenants))
            if oldest != tenant:
                del self._tenants[oldest]
            else:
                del self._tenants[tenant][0]
