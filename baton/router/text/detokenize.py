"""Incremental detokenization: no partial characters, and stop strings found across the borders of pieces.

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
MOST_BYTES = 4  # tokens that a character takes where each is a byte


class Detokenizer(Protocol):
    """Declares the detokenizer of one choice; the pieces that it returns join to the whole text."""

    def push(self, token_id: int) -> str:
        """Returns the text that ``token_id`` makes certain; may be ""."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text that several tokens make certain."""

    def flush(self) -> str:
        """Returns the text that was held back; incomplete characters become U+FFFD."""


class ByteDetokenizer:
    """Detokenizes vocabularies in which every token is a string of bytes (byte-level BPE): exact and O(1) per
    token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns the characters that ``token_id`` completes; bytes of an incomplete one are held back."""
        return self._utf8.decode(self._token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Returns the characters that several tokens complete."""
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """Returns U+FFFD for a character that stayed incomplete, else ""."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizes any vocabulary: decodes a short window of tokens twice, with and without the new ones.

    ``context`` holds the ids before the first one if the text continues them: then a leading space, which a decoder
    strips at the start of a text, is kept. Follows Text Generation Inference and vLLM.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._held: list[int] = []
        self._keep(list(context[-WINDOW_TOKENS - MOST_BYTES + 1 :]))

    def push(self, token_id: int) -> str:
        """Returns the text since the last push that returned any; "" while it ends within a character."""
        self._held.append(token_id)
        text = self._fresh()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._settle(text)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of several tokens, pushed one by one."""
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Returns the text of the tokens held back, incomplete characters as the decoder gives them."""
        return self._settle(self._fresh()) if self._held else ""

    def _fresh(self) -> str:
        return self._decode(self._settled + self._held)[len(self._text) :]

    def _settle(self, text: str) -> str:
        if REPLACEMENT in text:  # bytes that are no character spoil those before them, which are out already
            text = min(text, self._decode(self._held), key=_spoiled)
        if text or not self._text:  # else they were skipped, and the window needs tokens that are text
            self._keep(self._settled + self._held)
        self._held = []
        return text

    def _keep(self, ids: list[int]) -> None:
        """Keeps the end of ``ids`` as the window.

        Where bytes are tokens, decoders read neighbouring ones as one string, of which nothing is left if it begins
        within a character. So the window begins up to ``MOST_BYTES`` - 1 tokens earlier.
        """
        self._settled = ids[-WINDOW_TOKENS:]
        self._text = self._decode(self._settled)
        for count in range(WINDOW_TOKENS + 1, min(WINDOW_TOKENS + MOST_BYTES, len(ids) + 1)):
            if REPLACEMENT not in self._text:
                return
            longer = ids[-count:]
            if _spoiled(text := self._decode(longer)) < _spoiled(self._text):
                self._settled, self._text = longer, text


def _spoiled(text: str) -> int:
    return text.count(REPLACEMENT)


class StopStrings:
    """Passes text on up to the first stop string; holds back a tail that may be the beginning of one.

    ``include``: the stop string itself is passed on, too. ``found`` is the stop string that ended the text, or "".
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = tuple(map(_Matcher, stops))
        self._include = include
        self._tail = ""
        self.found = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text to pass on, and whether a stop string ended it."""
        held = len(self._tail)
        found = [(held + at, m.stop) for m in self._matchers if (at := m.push(text)) is not None]
        text = self._tail + text
        if found:
            at, self.found = min(found, key=_first_and_shortest)
            self._tail = ""
            return text[: at + len(self.found) if self._include else at], True
        keep = max((m.matched for m in self._matchers), default=0)
        self._tail = text[len(text) - keep :]
        return text[: len(text) - keep], False

    @property
    def held(self) -> str:
        """Returns the tail that is held back."""
        return self._tail

    def flush(self) -> str:
        """Returns the tail that was held back and forgets it, because it begins no stop string."""
        tail, self._tail = self._tail, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return tail


def _first_and_shortest(found: tuple[int, str]) -> tuple[int, int]:
    return found[0], len(found[1])


class _Matcher:
    """Looks for one stop string in a text that comes in pieces (Knuth, Morris, Pratt 1977): linear in the text.

    ``matched`` characters at the text's end are the longest beginning of ``stop`` there.
    """

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop, self._fallback, self.matched = stop, _fallbacks(stop), 0

    def push(self, text: str) -> int | None:
        """Returns where the stop string begins, counted from the beginning of ``text`` (below 0: before it), or
        None.
        """
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
    """Returns, for each length of a beginning of ``stop``, the longest shorter one that it ends with."""
    lengths = [0, 0]
    for char in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != char:
            length = lengths[length]
        lengths.append(length + (stop[length] == char))
    return tuple(lengths)
