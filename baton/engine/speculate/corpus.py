"""Keeps recent answers of each tenant, within a limited size, because later answers may repeat them.

Knows nothing of drafts. A tenant's answers are used for that tenant's requests alone, because accepted drafts show
in a request's timing. Answers are read in slices, so that the end of a long one delays no step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from baton.engine.speculate.text_search import GAP, PAIR, Match, longest, places, spelled

PIECE = 1 << 12  # tokens of a string, in which a match and what followed it stand together
OF_TENANT = 1 << 16  # tokens of a tenant: when there are more, its oldest string is dropped
MOST_TOKENS = 1 << 20  # of all tenants, four bytes each
MOST_TENANTS = 1024  # each has an object or two of its own, however short its answers
MOST_WAITING = 1 << 16  # tokens of queued answers; more are dropped
FOUR = 4  # tokens of a match that is searched in all of a tenant's answers; shorter ones in its latest string


class Corpus:
    """Holds the answers: ``take`` queues one, ``read`` adds some of the queue, ``match`` searches a tenant's.

    ``of_tenant`` limits the tokens of one tenant, ``most`` those of all.
    """

    def __init__(self, of_tenant: int = OF_TENANT, most: int = MOST_TOKENS) -> None:
        self._of_tenant, self._most = of_tenant, most
        self._piece = min(PIECE, max(1, of_tenant // 4))
        self._tenants: OrderedDict[bytes, deque[str]] = OrderedDict()
        self._waiting: deque[tuple[bytes, Sequence[int]]] = deque()
        self._at = 0  # tokens that were read of the first queued answer
        self._queued = self._held = 0  # tokens in the queue, and in strings

    @property
    def tokens(self) -> int:
        """Returns the number of tokens in strings and in the queue, one more for each answer."""
        return self._queued + self._held

    @property
    def waiting(self) -> int:
        """Returns the number of queued tokens."""
        return self._queued

    def held(self, tenant: bytes) -> int:
        """Returns the number of tokens in the tenant's strings."""
        return sum(map(len, self._tenants.get(tenant, ())))

    def take(self, tenant: bytes, answer: Sequence[int]) -> None:
        """Queues a finished answer; it is dropped if the queue is too long."""
        if len(answer) > 1 and self._queued + len(answer) < MOST_WAITING:
            self._waiting.append((tenant, answer))
            self._queued += len(answer)

    def read(self, most: int) -> None:
        """Moves up to ``most`` tokens of the first queued answer into its tenant's strings."""
        if not self._waiting:
            return
        tenant, answer = self._waiting[0]
        part = spelled(answer[self._at : self._at + min(most, self._piece)])
        self._at, self._queued = self._at + len(part), self._queued - len(part)
        if self._at == len(answer):
            self._waiting.popleft()
            self._at, part = 0, part + GAP
        self._add(tenant, part)

    def match(self, tenant: bytes, tail: str) -> Match | None:
        """Returns the longest of the latest matches of the tenant's answers with the end of ``tail``; None without
        any.
        """
        pieces = self._tenants.get(tenant)
        if not pieces:
            return None
        return _longest(reversed(pieces), tail, FOUR) or _longest((pieces[-1],), tail, PAIR)

    def _add(self, tenant: bytes, part: str) -> None:
        pieces = self._tenants.setdefault(tenant, deque())
        self._tenants.move_to_end(tenant)
        if not pieces or len(pieces[-1]) + len(part) > self._piece + 1:
            pieces.append(part)
        else:
            pieces[-1] += part
        self._held += len(part)
        while self.held(tenant) > self._of_tenant:
            self._held -= len(pieces.popleft())
        self._bound(tenant)

    def _bound(self, tenant: bytes) -> None:
        """Drops the least recently used strings beyond the limits, those of other tenants first."""
        while len(self._tenants) > MOST_TENANTS:
            _, dropped = self._tenants.popitem(last=False)
            self._held -= sum(map(len, dropped))
        while self._held > self._most:
            oldest = next(iter(self._tenants))
            self._held -= len(self._tenants[oldest].popleft())
            if not self._tenants[oldest]:
                del self._tenants[oldest]


def _longest(pieces: Iterable[str], tail: str, anchor: int) -> Match | None:
    """Returns the longest of the latest matches in ``pieces``, of which the first is the latest."""
    return longest(match for piece in pieces for match in places(piece, tail, anchor, len(piece) - 1))
