"""Conversion of text to token ids and back, by a model's tokenizer.json, or by bytes where it has none.

Knows nothing of chat, requests or event loops. ``encode`` may run in any thread (the Rust side drops the GIL).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer as RustTokenizer

from baton.protos.errors import CheckpointError, ContextTooLong, InvalidRequest
from baton.router.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer

BYTES = 256  # token ids that stand for one byte each
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class PairIds(NamedTuple):
    """Holds the token ids of two texts with special tokens, and for each id the segment (0 or 1) that it belongs
    to.
    """

    ids: list[int]
    types: list[int]


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of ``text``; special tokens written in it are recognized."""

    def encode_pair(self, first: str, second: str, most: int, most_second: int | None) -> PairIds:
        """Returns the token ids of two texts as one prompt of at most ``most`` tokens; ``second`` is truncated to
        fit.

        ``most_second`` limits the second's tokens further; None doesn't. Raises ContextTooLong if the first leaves
        no room, InvalidRequest if the tokenizer can't join pairs.
        """

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the token ids."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Returns the bytes that one token adds to the text, perhaps a part of a character; b"" for an unknown
        id.
        """

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer for one choice whose text continues the token ids ``context``."""


class HfTokenizer:
    """Converts by a tokenizer.json, with the ``tokenizers`` library. Raises CheckpointError if it can't be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer this version reads: {error}", "tokenizer") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = _decoder_type(self._tokenizer) == "ByteLevel"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of ``text``, computed without holding the GIL. Raises InvalidRequest for half a
        surrogate pair, which is no text.
        """
        try:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise _no_text(text) from None
        return encoding.ids

    def encode_pair(self, first: str, second: str, most: int, most_second: int | None) -> PairIds:
        """Returns the token ids of two texts, joined by the special tokens of the tokenizer's own template."""
        try:
            one, two = self._tokenizer.encode_batch([first, second], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise _no_text(first + second) from None
        room = most - len(one.ids) - self._tokenizer.num_special_tokens_to_add(is_pair=True)
        if room < 1:
            text = f"the first text takes {len(one.ids)} of {most} tokens, which leaves no room for the second"
            raise ContextTooLong(f"{text}: shorten it", "query")
        two.truncate(room if most_second is None else min(room, most_second))
        pair = self._tokenizer.post_process(one, two, add_special_tokens=True)
        return PairIds(pair.ids, pair.type_ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the token ids, decoded by the library."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Returns a token's bytes: exact for byte-level vocabularies, else from the token's own spelling."""
        if skip_special_tokens and token_id in self._special:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return _byte_level_bytes(token) if self._byte_level else _spelled_bytes(token)

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer: by bytes for a byte-level vocabulary, else by a window of tokens."""
        if self._byte_level:
            return ByteDetokenizer(lambda i: self.token_bytes(i, skip_special_tokens))
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens), context)


class ByteTokenizer:
    """Converts for a model without a tokenizer (the paced engine): an id below 256 is that byte, others read
    ``<id>``.
    """

    def __init__(self, vocab_size: int, special: Sequence[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._special = frozenset(special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the UTF-8 bytes of ``text`` as ids.

        Raises InvalidRequest if a byte is not in the vocabulary.
        """
        ids = list(text.encode())
        if ids and max(ids) >= self._vocab_size:
            raise InvalidRequest(
                f"this model has no tokenizer and only {self._vocab_size} tokens: send the prompt as token ids",
                "prompt",
            )
        return ids

    def encode_pair(self, first: str, second: str, most: int, most_second: int | None) -> PairIds:
        """Raises InvalidRequest, because bytes have nothing to stand between two texts."""
        raise InvalidRequest("this model has no tokenizer, which pairs of texts need", "model")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids' bytes; invalid UTF-8 is replaced by U+FFFD."""
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Returns the id's byte, ``<id>`` for an id from 256 on, b"" for a special one that is skipped."""
        if skip_special_tokens and token_id in self._special:
            return b""
        return bytes([token_id]) if token_id < BYTES else f"<{token_id}>".encode()

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer that works by bytes."""
        return ByteDetokenizer(lambda i: self.token_bytes(i, skip_special_tokens))


class KeepingTokenizer:
    """Converts as ``tokenizer`` does, and leaves the special tokens ``kept`` in a text that skips the others: what
    reads the text needs them.
    """

    def __init__(self, tokenizer: Tokenizer, kept: frozenset[int]) -> None:
        self._tokenizer, self._kept = tokenizer, kept
        self.encode, self.encode_pair = tokenizer.encode, tokenizer.encode_pair

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the token ids, decoded by ``tokenizer``."""
        shown = [i for i in ids if self.token_bytes(i, True)] if skip_special_tokens else ids
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Returns a token's bytes; none of a special one that is skipped and not kept."""
        return self._tokenizer.token_bytes(token_id, skip_special_tokens and token_id not in self._kept)

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer of the kind that ``tokenizer`` has."""
        plain = self._tokenizer.detokenizer(context, skip_special_tokens)
        if isinstance(plain, ByteDetokenizer):
            return ByteDetokenizer(lambda i: self.token_bytes(i, skip_special_tokens))
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens), context)


def _no_text(text: str) -> InvalidRequest:
    """Returns the error for a text that the library refused, because UTF-8 has no halves of surrogate pairs."""
    at = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return InvalidRequest(f"the prompt is no valid text: half a surrogate pair at character {at}", "prompt")


def token_name(token: bytes) -> str:
    """Returns a token as text for logprobs; one that isn't UTF-8 as OpenAI writes it: ``bytes:\\xe4\\xbd``."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _decoder_type(tokenizer: RustTokenizer) -> str:
    decoder = tokenizer.decoder
    return "" if decoder is None else str(json.loads(decoder.__getstate__())["type"])


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest from U+0100 up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(BYTES) if b not in plain]
    return {chr(b): b for b in plain} | {chr(BYTES + i): b for i, b in enumerate(rest)}


def _byte_level_bytes(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token: its spelling is its text
        return token.encode()


def _spelled_bytes(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()
