"""Keeps recent answers of each tenant in suffix automata of limited size, because later answers may repeat them.

Knows nothing of drafts. A tenant's answers are used for that tenant's requests alone, because accepted drafts show
in a request's timing. Answers are read in slices, so that the end of a long one delays no step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from baton.engine.speculate.automaton import SuffixAutomaton

HALF_TOKENS = 1 << 15  # tokens of one automaton; a tenant has two: when the newer is full, the older is dropped
MOST_TOKENS = 1 << 17  # of all tenants; some 400 bytes each
MOST_WAITING = 1 << 15  # tokens of queued answers; more are dropped
NOTHING = object()  # returned where an insertion has ended
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
        self._queued = self._held = 0  # tokens in the queue, and in automata
        self._insertion: Iterator[None] = iter(())  # of the token that was taken last

    @property
    def tokens(self) -> int:
        """Returns the number of tokens in automata and in the queue."""
        return self._queued + self._held

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
        """Adds queued tokens to automata, in ``most`` pieces of bounded work; a token takes one or more."""
        for _ in range(most):
            if next(self._insertion, NOTHING) is NOTHING:
                if not self._waiting:
                    return
                self._begin()

    def _begin(self) -> None:
        """Takes the next queued token, and begins to add it to its tenant's automaton."""
        tenant, answer = self._waiting[0]
        self._insertion = self._part(tenant).insertion(answer.popleft())
        next(self._insertion, None)
        self._queued, self._held = self._queued - 1, self._held + 1
        if not answer:
            self._waiting.popleft()
        self._bound(tenant)

    def _part(self, tenant: bytes) -> SuffixAutomaton:
        """Returns the automaton that the tenant's answers are added to."""
        parts = self._tenants.setdefault(tenant, [])
        self._tenants.move_to_end(tenant)
        if not parts or len(parts[-1]) >= self._half:
            self._drop(parts, len(parts) - 1)
            parts.append(SuffixAutomaton())
        return parts[-1]

    def _bound(self, tenant: bytes) -> None:
        """Drops the least recently used automata beyond the limit, those of other tenants first."""
        while self._held > self._most:
            oldest = next(iter(self._tenants))
            if oldest != tenant:
                self._drop(self._tenants.pop(oldest), 2)
            else:
                self._drop(self._tenants[tenant], 1)

    def _drop(self, parts: list[SuffixAutomaton], count: int) -> None:
        """Drops the first ``count`` automata of a tenant's, or as many as there are."""
        for part in parts[: max(0, count)]:
            self._held -= len(part)
        del parts[: max(0, count)]
