"""Recent answers of each tenant, as automata with a ceiling: what one of them says, the next may say too.

Knows nothing of drafts. A tenant's answers are seen by that tenant's requests alone, because what is accepted shows
in a request's times. Answers are read in slices, so that the end of a long one delays no step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from baton.engine.speculate.automaton import SuffixAutomaton

HALF_TOKENS = 1 << 15  # a tenant has two automata: when the younger is full, the older goes
MOST_TOKENS = 1 << 17  # of all tenants; some 400 bytes each
MOST_WAITING = 1 << 15  # tokens of ended answers that weren't read yet; more are dropped
GAP = -2  # behind each answer; no token


class Corpus:
    """``take`` queues an answer, ``read`` reads some of the queue, ``automata`` are what a tenant's drafts use."""

    def __init__(self, half: int = HALF_TOKENS, most: int = MOST_TOKENS) -> None:
        self._half, self._most = half, most
        self._tenants: OrderedDict[bytes, list[SuffixAutomaton]] = OrderedDict()
        self._waiting: deque[tuple[bytes, deque[int]]] = deque()
        self._queued = 0

    @property
    def tokens(self) -> int:
        """Tokens that are held, in automata and in the queue."""
        return self._queued + sum(len(part) for parts in self._tenants.values() for part in parts)

    @property
    def waiting(self) -> int:
        """Tokens that wait to be read."""
        return self._queued

    def automata(self, tenant: bytes) -> Sequence[SuffixAutomaton]:
        """The tenant's, the younger last."""
        return self._tenants.get(tenant, ())

    def take(self, tenant: bytes, answer: Sequence[int]) -> None:
        """Queues an answer that ended. It is dropped where too much waits already."""
        if len(answer) > 1 and self._queued + len(answer) < MOST_WAITING:
            self._waiting.append((tenant, deque((*answer, GAP))))
            self._queued += len(answer) + 1

    def read(self, most: int) -> None:
        """Reads up to ``most`` queued tokens."""
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
        """The automaton that the tenant's answers go to."""
        parts = self._tenants.setdefault(tenant, [])
        self._tenants.move_to_end(tenant)
        if not parts or len(parts[-1]) >= self._half:
            parts.append(SuffixAutomaton())
            del parts[:-2]
        return parts[-1]

    def _bound(self, tenant: bytes) -> None:
        """Drops what was used longest ago, others' first."""
        while self.tokens - self._queued > self._most:
            oldest = next(iter(self._tenants))
            if oldest != tenant:
                del self._tenants[oldest]
            else:
                del self._tenants[tenant][0]
