"""Where the last tokens of a text stood before: a chain of earlier places for each pair of tokens, as LZ77 keeps.

Knows nothing of requests or drafts. It costs some 100 bytes and a quarter of a microsecond per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

TRIED = 8  # earlier places that one look-up compares
LONGEST = 48  # tokens that one comparison goes back


class Match(NamedTuple):
    """The ``length`` tokens up to ``end`` (exclusive) are also the text's last ones."""

    end: int
    length: int


class PairIndex:
    """An index of ``tokens``, which may grow; what is new in it is read by ``catch_up``."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._last: dict[tuple[int, int], int] = {}
        self._before = array("i", (-1,))  # by place: where the pair that ends there ended before

    @property
    def behind(self) -> int:
        """Tokens that can be indexed and aren't: all but the last are."""
        return max(0, len(self._tokens) - 1 - len(self._before))

    def catch_up(self, most: int) -> None:
        """Index ``most`` more tokens, as far as there are."""
        tokens, last, before = self._tokens, self._last, self._before
        for at in range(len(before), min(len(before) + most, len(tokens) - 1)):
            pair = tokens[at - 1], tokens[at]
            before.append(last.get(pair, -1))
            last[pair] = at

    def matches(self) -> list[Match]:
        """Returns the latest matches with the text's end, two tokens at least, from the last one on."""
        tokens, found = self._tokens, list[Match]()
        at = self._last.get((tokens[-2], tokens[-1]), -1) if len(tokens) >= 3 else -1
        while at >= 0 and len(found) < TRIED:
            found.append(Match(at + 1, self._length(at)))
            at = self._before[at]
        return found

    def _length(self, at: int) -> int:
        """How many tokens up to ``at`` (inclusive) are the text's last ones."""
        tokens, length = self._tokens, 2
        last = len(tokens) - 1
        while length < LONGEST and length <= at and tokens[at - length] == tokens[last - length]:
            length += 1
        return length


def following(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """Returns ``count`` tokens that follow ``end``; past the text's end they follow themselves, as in LZ77."""
    found = list(tokens[end : end + count])
    period = len(tokens) - end
    while len(found) < count and period:
        found.append(found[-period])
    return found
