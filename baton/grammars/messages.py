"""Messages between a process and its grammar processes: one msgpack packet each.

Knows nothing of sockets. Every message fits a packet (``MOST_IDS``); the socket keeps packets apart.
"""

from __future__ import annotations

import msgspec

from baton.grammars.limits import ProcessBounds
from baton.protos.errors import InvalidRequest
from baton.protos.nouns import MAX_GRAMMAR_BYTES, Grammar

PACKET_BYTES = 1 << 17  # bytes of a message at most, which MAX_GRAMMAR_BYTES of a grammar fit
MOST_IDS = 8192  # token ids in one Advance: five bytes each at most
MOST_FORCED = 16  # forced token ids that a NextMask names, as many as a draft has at most


class TokenizerSpec(msgspec.Struct, frozen=True):
    """Names a tokenizer: the file at ``path``, or byte tokens if ``path`` is "".

    ``bounds`` are of each grammar that is followed with it.
    """

    path: str
    vocab_size: int
    ends: tuple[int, ...] = ()  # ids of the end tokens
    bounds: ProcessBounds = ProcessBounds()


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for a new grammar process, called ``number``; the socket that it serves is passed with this packet."""

    number: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks to kill the grammar process ``number`` at once."""

    number: int


class TokenizerFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that the tokenizer can't be loaded, so that there can't be a grammar process."""

    reason: str


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Names the one grammar of the process; the first message to it."""

    kind: str
    spec: str


class Advance(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Advances sequence ``seq``, new if unknown, by token ``ids``; answered with ``NextMask`` unless ``more`` ids
    follow.
    """

    seq: int
    ids: tuple[int, ...]
    more: bool = False


class Preview(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks what may follow each of ``ids`` if sequence ``seq`` continued with them; the sequence stays where it is.

    Answered with a ``PreviewMask`` for each of ``ids`` in turn, up to the first that the grammar doesn't allow,
    that completes it or that takes too long, and one that ends the preview. ``number`` is repeated in the answers.
    """

    seq: int
    number: int
    ids: tuple[int, ...]


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drops the sequence ``seq``; not answered."""

    seq: int


class ProcessReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that the process runs within its limits."""


class ProcessEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that the process has ended: of what it did (``by_itself``), or because something else killed it. The
    last message, which the forking process sends.
    """

    by_itself: bool


class CompileResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that the grammar is compiled, or why it can't be (``error``).

    ``grown`` is the memory taken so far, in bytes.
    """

    error: str
    grown: int


class NextMask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """States what ``seq`` may continue with after ``taken`` tokens: ``mask`` has a bit per token id.

    It is empty if the sequence is complete (``stopped``) or failed (``error``). ``grown`` is the memory taken so
    far, in bytes. ``forced`` are token ids that spell what has to follow, empty if several texts may.
    """

    seq: int
    taken: int
    stopped: bool
    error: str
    mask: bytes
    grown: int
    forced: tuple[int, ...] = ()


class PreviewMask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """States what may follow the next token of preview ``number`` of sequence ``seq``: ``mask`` has a bit per token
    id.

    It is empty at the preview's end.
    """

    seq: int
    number: int
    mask: bytes


def compile_of(grammar: Grammar) -> Compile:
    """Returns the message for ``grammar``. Raises InvalidRequest if it is too long or not valid Unicode."""
    try:
        size = max(len(grammar.spec), len(grammar.spec[: MAX_GRAMMAR_BYTES + 1].encode()))
    except UnicodeEncodeError:
        raise InvalidRequest("the grammar has a lone surrogate: give valid Unicode", "grammar") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar is over {MAX_GRAMMAR_BYTES} bytes: shorten it", "grammar")
    return Compile(grammar.kind, grammar.spec)


ToServer = Fork | Kill
ToChild = Compile | Advance | Preview | Forget
FromChild = ProcessReady | CompileResult | NextMask | PreviewMask | ProcessEnded
