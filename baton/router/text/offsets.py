"""The place of each token in the text that it writes, in characters.

Knows nothing of models or answers.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from baton.router.text.tokenizer import Tokenizer


class TextOffsets:
    """Counts the characters before each token of a text that begins at offset ``begin``."""

    def __init__(self, begin: int = 0) -> None:
        self._at = begin
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Returns the offset of each token, given the bytes that each adds to the text; one that goes on with a
        character has that character's.
        """
        return [self._next(piece) for piece in pieces]

    def _next(self, piece: bytes) -> int:
        at = self._at
        self._at += len(self._utf8.decode(piece))
        return at


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Returns the offset of each of a prompt's tokens in ``text``.

    Special tokens count where the text spells them; one that was put before the text doesn't.
    """
    spelled = [tokenizer.token_bytes(i) for i in token_ids]
    for hidden in (0, 1):
        if b"".join(spelled[hidden:]).decode(errors="replace") == text:
            return TextOffsets().of([b""] * hidden + spelled[hidden:])
    return TextOffsets().of([tokenizer.token_bytes(i, True) for i in token_ids])
