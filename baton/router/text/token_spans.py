"""Assignment of tokens to the parts of an answer into which its text was parsed.

Knows nothing of reasoning, calls or JSON: parts come in the text's order, and marks stand between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from baton.protos.nouns import TokenLogprobs


class _Span(msgspec.Struct, frozen=True):
    """Bytes of the text that one token wrote."""

    begin: int
    end: int
    entry: TokenLogprobs


class TokenSpans:
    """Knows which bytes of the text each token wrote; ``shown`` returns the bytes that a token id adds to it.

    Without logprobs every part has no tokens. ``undivided``: the text is one part, which gets all tokens.
    """

    def __init__(self, shown: Callable[[int], bytes], marks: Sequence[str] = (), undivided: bool = False) -> None:
        self._shown, self._undivided = shown, undivided
        self._aligned = False
        self._marks = tuple(mark.encode() for mark in marks)
        self._text = b""  # what was not taken yet
        self._at = 0  # bytes before it
        self._written = 0
        self._waiting: deque[_Span] = deque()

    def add(self, text: str, tokens: Iterable[TokenLogprobs]) -> None:
        """Adds the next text and tokens; the text may lag behind the tokens."""
        for entry in tokens:
            begin, self._written = self._written, self._written + len(self._shown(entry.chosen.token_id))
            self._waiting.append(_Span(begin, self._written, entry))
        if self._waiting:
            self._text += text.encode()
            self._align()

    def take(self, part: str) -> list[TokenLogprobs]:
        """Returns the tokens that wrote ``part``, the next part of the text; [] if it isn't found in the text.

        A token belongs to one part only.
        """
        if not self._waiting:
            return []
        if self._undivided:
            return self._between(0, self._written)
        self._skip_marks()
        wanted = part.encode()
        found = self._text.find(wanted)
        if found < 0:  # a reader made it up
            return []
        begin, end = self._at + found, self._at + found + len(wanted)
        self._text, self._at = self._text[found + len(wanted) :], end
        return self._between(begin, end)

    def _align(self) -> None:
        """The space before a text's first word is in its token, but not always in the text."""
        if self._aligned or not self._text:
            return
        self._aligned = True
        first = self._shown(self._waiting[0].entry.chosen.token_id)
        if first.startswith(b" ") and not self._text.startswith(b" "):
            self._waiting = deque(_Span(s.begin - 1, s.end - 1, s.entry) for s in self._waiting)
            self._written -= 1

    def _between(self, begin: int, end: int) -> list[TokenLogprobs]:
        taken = []
        while self._waiting and self._waiting[0].begin < end:
            span = self._waiting.popleft()
            if span.end > begin:
                taken.append(span.entry)
        return taken

    def _skip_marks(self) -> None:
        """Skips what stands between two parts, because it can hold the letters of the second."""
        while True:
            rest = self._text.lstrip()
            mark = next((mark for mark in self._marks if rest.startswith(mark)), None)
            if mark is None:
                return
            self._at += len(self._text) - len(rest) + len(mark)
            self._text = rest[len(mark) :]
