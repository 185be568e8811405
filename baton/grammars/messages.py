"""What a process and its grammar processes tell each other: one msgpack packet per message.

Knows nothing of sockets. Every message fits a packet (``MOST_IDS``): the socket keeps their borders.
"""

from __future__ import annotations

import msgspec

from baton.grammars.limits import ProcessBounds
from baton.protos.errors import InvalidRequest
from baton.protos.nouns import MAX_GRAMMAR_BYTES, Grammar

PACKET_BYTES = 1 << 17
MOST_IDS = 8192  # token ids in one Take: five bytes each at most


class TokenizerSpec(msgspec.Struct, frozen=True):
    """Names a tokenizer: the file at ``path``, or bytes where ``path`` is empty. ``ends`` are its end tokens.

    ``bounds`` are of each grammar that is followed with it.
    """

    path: str
    vocab_size: int
    ends: tuple[int, ...] = ()
    bounds: ProcessBounds = ProcessBounds()


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Make a grammar process. The socket that it serves comes beside this packet."""

    number: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End that process, whatever it does."""

    number: int


class TokenizerFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tokenizer can't be loaded: no grammar process will ever be."""

    reason: str


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The one grammar of this process; the first message."""

    kind: str
    spec: str


class Advance(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Advances sequence ``seq`` by ``ids``; a new one begins. ``NextMask`` answers, unless ``more`` is to come."""

    seq: int
    ids: tuple[int, ...]
    more: bool = False


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forgets the sequence ``seq``. Not answered."""

    seq: int


class ProcessReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process is there, within its limits."""


class CompileResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The grammar can be followed, or why it can't. ``grown`` is what the process has taken, in bytes."""

    error: str
    grown: int


class NextMask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where ``seq`` stands after ``taken`` tokens. ``mask`` has a bit per token id; empty where it is stopped."""

    seq: int
    taken: int
    stopped: bool
    error: str
    mask: bytes
    grown: int


def compile_of(grammar: Grammar) -> Compile:
    """Returns the message for ``grammar``. Raises InvalidRequest for one that is too long, or no text."""
    try:
        size = max(len(grammar.spec), len(grammar.spec[: MAX_GRAMMAR_BYTES + 1].encode()))
    except UnicodeEncodeError:
        raise InvalidRequest("the grammar has a lone surrogate: give valid Unicode", "grammar") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar is over {MAX_GRAMMAR_BYTES} bytes: shorten it", "grammar")
    return Compile(grammar.kind, grammar.spec)


ToServer = Fork | Kill
ToChild = Compile | Advance | Forget
FromChild = ProcessReady | CompileResult | NextMask
