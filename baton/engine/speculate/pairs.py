"""Finds earlier occurrences of a text's last tokens, by a chain of earlier positions for each pair of tokens, as in
LZ77.

Knows nothing of requests or drafts. It costs some 100 bytes and a quarter of a microsecond per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

TRIED = 8  # earlier places that one look-up compares
LONGEST = 48  # tokens that one comparison goes back


class Match(NamedTuple):
    """Says that the ``length`` tokens before position ``end`` equal the text's last tokens."""

    end: int
    length: int


class PairIndex:
    """Indexes pairs of adjacent tokens in ``tokens``, which may grow; ``catch_up`` adds new ones."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._last: dict[tuple[int, int], int] = {}
        self._before = array("i", (-1,))  # by place: where the pair that ends there ended before

    @property
    def behind(self) -> int:
        """Returns the number of tokens that are still to be indexed; the last token never is."""
        return max(0, len(self._tokens) - 1 - len(self._before))

    def catch_up(self, most: int) -> None:
        """Indexes up to ``most`` more tokens."""
        tokens, last, before = self._tokens, self._last, self._before
        for at in range(len(before), min(len(before) + most, len(tokens) - 1)):
            pair = tokens[at - 1], tokens[at]
            before.append(last.get(pair, -1))
            last[pair] = at

    def matches(self) -> list[Match]:
        """Returns up to TRIED earlier matches of at least two tokens with the text's end, the latest first; none
        after one of LONGEST tokens.
        """
        tokens, found = self._tokens, list[Match]()
        at = self._last.get((tokens[-2], tokens[-1]), -1) if len(tokens) >= 3 else -1
        while at >= 0 and len(found) < TRIED:
            found.append(Match(at + 1, self._length(at)))
            at = self._before[at] if found[-1].length < LONGEST else -1
        return found

    def _length(self, at: int) -> int:
        """Returns how many tokens up to position ``at`` (inclusive) equal the text's last ones, at most LONGEST."""
        tokens, length = self._tokens, 2
        last = len(tokens) - 1
        while length < LONGEST and length <= at and tokens[at - length] == tokens[last - length]:
            length += 1
        return length


def following(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """Returns the ``count`` tokens from position ``end`` on; past the text's end they repeat periodically, as in
    LZ77.
    """
    found = list(tokens[end : end + count])
    period = len(tokens) - end
    while len(found) < count and period:
        found.append(found[-period])
    return found
