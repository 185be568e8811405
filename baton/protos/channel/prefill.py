"""Channel messages about a prefill worker's requests: the prompt to compute, and the KV blocks that are ready to be
sent.
"""

from __future__ import annotations

import msgspec

from baton.protos.channel.message import Message
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import EngineRequest, Station, TokenLogprobs, TokenRun


class Prefill(Message):
    """Asks to compute a prompt.

    Blocks with an index below ``held_blocks`` or in ``received_blocks`` need not be sent. The receiver of ``whole``
    blocks has pages of all layers, so that every page of a block is sent, whatever its window.
    """

    key: int
    request: EngineRequest
    held_blocks: int
    received_blocks: tuple[int, ...]
    whole: bool = False


class SendClosed(Message):
    """Reports that the request's handoff has ended, so that its pages need no pin any more."""

    key: int


class ShipBlock(msgspec.Struct, frozen=True, array_like=True):
    """Describes one finished KV block to send: its index in the prompt, its page, its hash, and the number of
    tokens it holds.

    ``resident``: the page on the device holds it as well, until SendClosed.
    """

    index: int
    page: int
    hash: bytes
    tokens: int
    resident: bool = False


class BlocksReady(Message):
    """Reports finished KV blocks, in order; their pages are pinned until SendClosed."""

    key: int
    blocks: tuple[ShipBlock, ...]


class PrefillDone(Message):
    """Reports the first token, after all blocks were reported. ``at``: monotonic seconds when it was generated."""

    key: int
    first: TokenRun
    cached_tokens: int
    stations: tuple[Station, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    at: float | None = None


class PrefillFailed(Message):
    """Reports that the prompt was not computed, because of an error or a cancel."""

    key: int
    error: ErrorInfo
