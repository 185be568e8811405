"""Builds a suffix automaton that grows by one token at a time; it holds every substring of its text in linear
memory.

Knows nothing of requests or of time. Source: Blumer et al., 1985. States lie in flat arrays; only states with
several transitions, a minority, have a dictionary. Each state stores one position at which its substrings end,
mostly a late one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

NONE = -1  # marks a state without a link, or a token that isn't there
RENEWED = 4  # suffix links followed to update end positions: updating all would cost more than it brings
FOLLOWED = 32  # suffix links that one token of a match is followed by; a match that needs more is given up


class SuffixAutomaton:
    """Holds every substring of the text ``tokens``. State 0 is the empty string."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._length, self._link, self._end = array("i", (0,)), array("i", (NONE,)), array("i", (0,))
        self._token, self._next = array("i", (NONE,)), array("i", (NONE,))  # the first way on from a state
        self._more: dict[int, dict[int, int]] = {}  # the others
        self._last = 0
        self.earlier = 0, 0  # (end position, length) of an earlier occurrence of the text's longest repeated suffix
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def states(self) -> int:
        """Returns the number of states, at most twice the tokens."""
        return len(self._length)

    def append(self, token: int) -> None:
        """Adds one token to the text."""
        for _ in self.insertion(token):
            pass

    def insertion(self, token: int) -> Iterator[None]:
        """Adds one token to the text in parts of bounded work, which end at each ``yield``.

        A token after a long run of equal ones takes as many parts as the run has tokens. Between parts the
        automaton may be read: matches with the latest tokens may then be found shorter than they are.
        """
        self.tokens.append(token)
        end, last = len(self.tokens), self._last
        made, at = self._new(self._length[last] + 1, 0, end), last
        while at != NONE and self.step(at, token) == NONE:
            self._lead(at, token, made)
            at = self._link[at]
            yield
        if at != NONE:
            found = self.step(at, token)
            if self._length[found] != self._length[at] + 1:
                part = self._split(found, self._length[at] + 1)
                while at != NONE and self.step(at, token) == found:
                    self._lead(at, token, part)
                    at = self._link[at]
                    yield
                self._link[found] = part
                found = part
            self._link[made] = found
        self._last, link = made, self._link[made]
        self.earlier = self._end[link], self._length[link]
        self._renew(link, end)

    def step(self, state: int, token: int) -> int:
        """Returns the state of ``state``'s strings followed by ``token``, or NONE if these don't occur."""
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return NONE if more is None else more.get(token, NONE)

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extends a match of ``length`` tokens at ``state`` by ``token``, from the left shortened as needed.

        Returns the (state, length) of the longest suffix of match and token that occurs in the text; (0, 0) for
        none. After FOLLOWED suffix links the token alone counts.
        """
        state, length = self._settled(state, length)
        links = FOLLOWED
        while (found := self.step(state, token)) == NONE and state:
            state = self._link[state] if links else 0
            length, links = self._length[state], links - 1
        return (0, 0) if found == NONE else self._settled(found, length + 1)

    def end(self, state: int) -> int:
        """Returns a position in ``tokens`` right after an occurrence of the state's substrings."""
        return self._end[state]

    def _settled(self, state: int, length: int) -> tuple[int, int]:
        """Returns the state that holds the match now, as states may have been split since it was found."""
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state, length

    def _new(self, length: int, link: int, end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        self._token.append(NONE)
        self._next.append(NONE)
        return len(self._length) - 1

    def _lead(self, state: int, token: int, to: int) -> None:
        if self._next[state] == NONE or self._token[state] == token:
            self._token[state], self._next[state] = token, to
        else:
            self._more.setdefault(state, {})[token] = to

    def _split(self, found: int, length: int) -> int:
        """Returns a new state for the strings of ``found`` with at most ``length`` tokens; it isn't led to yet."""
        part = self._new(length, self._link[found], self._end[found])
        self._token[part], self._next[part] = self._token[found], self._next[found]
        if found in self._more:
            self._more[part] = dict(self._more[found])
        return part

    def _renew(self, state: int, end: int) -> None:
        for _ in range(RENEWED):
            if state <= 0:
                return
            self._end[state] = end
            state = self._link[state]
