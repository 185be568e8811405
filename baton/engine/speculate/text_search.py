"""Finds earlier occurrences of a text's last tokens, by searching it as a string with one character per token.

Knows nothing of requests or drafts. Python's search of strings reads a few tokens per nanosecond, so no index is
kept: 2,000 tokens are searched in under a microsecond, 128,000 in 40. A token takes four bytes at most.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

TRIED = 8  # earlier places that one look-up compares
LONGEST = 48  # tokens that one comparison goes back
PAIR = 2  # tokens of the shortest match that counts
GAP = "\U0010ffff"  # separates texts; no token has this id
CODEC = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


class Match(NamedTuple):
    """Says that the ``length`` tokens before position ``end`` of ``text`` equal those that are looked for."""

    text: str
    end: int
    length: int


def spelled(tokens: Sequence[int]) -> str:
    """Returns ``tokens``, whose ids are below that of GAP, as a string with one character for each."""
    return array("I", tokens).tobytes().decode(CODEC, "surrogatepass")


def places(text: str, tail: str, anchor: int, below: int) -> Iterator[Match]:
    """Yields the matches of ``anchor`` tokens or more between ``text[:below]`` and the end of ``tail``, the latest
    first.
    """
    wanted = tail[-anchor:]
    at = text.rfind(wanted, 0, below) if len(wanted) == anchor else -1
    while at >= 0:
        end = at + anchor
        yield Match(text, end, _length(text, end, tail, anchor))
        at = text.rfind(wanted, 0, end - 1)


def tried(matches: Iterable[Match]) -> Iterator[Match]:
    """Yields the first TRIED of ``matches``, and none after one of LONGEST tokens."""
    for match in islice(matches, TRIED):
        yield match
        if match.length == LONGEST:
            return


def longest(matches: Iterable[Match]) -> Match | None:
    """Returns the longest of the first TRIED ``matches``, of equal ones the first; None without any."""
    return max(tried(matches), key=lambda match: match.length, default=None)


def following(match: Match, count: int) -> list[int]:
    """Returns up to ``count`` tokens that follow ``match``, as far as a GAP; past the text's end they repeat
    periodically, as in LZ77.
    """
    found = match.text[match.end : match.end + count]
    if GAP in found:
        found = found[: found.index(GAP)]
    elif found:
        found = (found * (1 + count // len(found)))[:count]
    return list(map(ord, found))


def _length(text: str, end: int, tail: str, known: int) -> int:
    """Returns how many tokens of ``text`` up to ``end`` equal the last ones of ``tail``, at most LONGEST; ``known``
    of them do.
    """
    most = min(end, len(tail), LONGEST)
    if text[end - most : end] == tail[len(tail) - most :]:
        return most
    while text[end - known - 1] == tail[-known - 1]:
        known += 1
    return known


class SearchableText:
    """Holds a sequence's tokens, which may grow, as a string behind ``before``; ``catch_up`` adds new ones."""

    def __init__(self, tokens: Sequence[int], before: str = "") -> None:
        self._tokens, self._read = tokens, 0
        self.text = before

    @property
    def behind(self) -> int:
        """Returns the number of tokens that are still to be added."""
        return len(self._tokens) - self._read

    def catch_up(self, most: int) -> None:
        """Adds up to ``most`` more tokens."""
        if self._read < len(self._tokens):
            fresh = self._tokens[self._read : self._read + most]
            self.text += spelled(fresh)
            self._read += len(fresh)

    @property
    def tail(self) -> str:
        """Returns the text's last LONGEST tokens."""
        return spelled(self._tokens[-LONGEST:]) if self.behind else self.text[-LONGEST:]

    def matches(self, length: int | None = None) -> list[Match]:
        """Returns up to TRIED earlier matches with the end of the first ``length`` tokens (None: of all).

        The latest is first; there is none after one of LONGEST tokens.
        """
        return list(tried(self._places(PAIR, length)))

    def longest(self, anchor: int, length: int | None = None) -> Match | None:
        """Returns the longest of the latest earlier matches of ``anchor`` tokens or more with the end of the first
        ``length`` tokens (None: of all); None without any.
        """
        return longest(self._places(anchor, length))

    def _places(self, anchor: int, length: int | None) -> Iterator[Match]:
        later = 0 if length is None else len(self._tokens) - length
        if length is None or not later:
            return places(self.text, self.tail, anchor, len(self.text) - 1)
        text = self.text[: max(0, len(self.text) - max(0, later - self.behind))]
        return places(text, spelled(self._tokens[max(0, length - LONGEST) : length]), anchor, len(text) - 1)
