"""Token ids -> text as they come: no half characters, and stop strings seen across the borders of pieces.

Knows nothing of models, requests or streams.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "�"
WINDOW_TOKENS = 6  # tokens decoded again with each new one, because decoders look at neighbours
MAX_HELD_TOKENS = 16  # tokens held for an unfinished character, because none is longer


class Detokenizer(Protocol):
    """Writes the text of one choice, piece by piece; the pieces joined are the whole text."""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with ``token_id``; may be empty."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became certain with several tokens."""

    def flush(self) -> str:
        """Returns what was still held back; incomplete characters become U+FFFD."""


class ByteDetokenizer:
    """Detokenizes vocabularies in which every token is a string of bytes (byte-level BPE): exact and O(1) per
    token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns whole characters only; bytes of an unfinished one wait."""
        return self._utf8.decode(self._token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Decodes several tokens in one call."""
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """Returns the unfinished character, replaced."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizes any other vocabulary: decodes a short window twice, with and without the new tokens.

    ``context`` holds ids before the first one, where the text continues them: a leading space that a decoder strips
    at the start of a text is kept then. The way of Text Generation Inference and vLLM.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._settled = list(context[-WINDOW_TOKENS:])
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Returns text once it doesn't end in the middle of a character."""
        self._held.append(token_id)
        text = self._fresh()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._settle(text)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Pushes tokens one by one: what is certain depends on where each ends."""
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Returns what is held, as the decoder gives it."""
        return self._settle(self._fresh()) if self._held else ""

    def _fresh(self) -> str:
        return self._decode(self._settled + self._held)[len(self._decode(self._settled)) :]

    def _settle(self, text: str) -> str:
        self._settled = (self._settled + self._held)[-WINDOW_TOKENS:]
        self._held = []
        return text


class StopStrings:
    """Lets text through up to the first stop string; holds back a tail that may be the start of one."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = tuple(map(_Matcher, stops))
        self._include = include
        self._tail = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may go out, and whether a stop string ended it."""
        held = len(self._tail)
        found = [(held + at, len(m.stop)) for m in self._matchers if (at := m.push(text)) is not None]
        text = self._tail + text
        if found:
            at, length = min(found)
            self._tail = ""
            return text[: at + length if self._include else at], True
        keep = max((m.matched for m in self._matchers), default=0)
        self._tail = text[len(text) - keep :]
        return text[: len(text) - keep], False

    @property
    def held(self) -> str:
        """Returns the tail that waits."""
        return self._tail

    def flush(self) -> str:
        """Returns the held tail, of which no stop string came."""
        tail, self._tail = self._tail, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return tail


class _Matcher:
    """Looks for one stop string in a text that comes in pieces (Knuth, Morris, Pratt 1977): linear in the text.

    ``matched`` characters at the text's end are the longest beginning of ``stop`` there.
    """

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop, self._fallback, self.matched = stop, _fallbacks(stop), 0

    def push(self, text: str) -> int | None:
        """Where the stop string begins, counted from the beginning of ``text`` (below 0: before it), or None."""
        stop, fallback, matched, at = self.stop, self._fallback, self.matched, 0
        while at < len(text):
            if not matched:  # nothing begun: the next first character, found in C
                at = text.find(stop[0], at)
                if at < 0:
                    break
                matched, at = 1, at + 1
            elif text[at] == stop[matched]:
                matched, at = matched + 1, at + 1
            else:
                matched = fallback[matched]
            if matched == len(stop):
                self.matched = 0
                return at - matched
        self.matched = matched
        return None


@functools.lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each length of a beginning of ``stop``, the longest shorter one that it ends with."""
    lengths = [0, 0]
    for char in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != char:
            length = lengths[length]
        lengths.append(length + (stop[length] == char))
    return tuple(lengths)
