"""A decode worker's requests: the lease, the blocks that arrive for it, and the tokens that it writes."""

from __future__ import annotations

from baton.protos.channel.message import Message
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import EngineRequest, Station, TokenLogprobs, TokenRun


class Admit(Message):
    """Asks to reserve pages and to open a lease of ``ttl_s`` seconds; answered by Admitted or Refused.

    With ``local`` this worker reads the prompt itself; else another one hands its KV over.
    """

    key: int
    request: EngineRequest
    local: bool
    ttl_s: float


class Rearm(Message):
    """Announces a second prefill under ``epoch``; answered by Rearmed or Refused."""

    key: int
    lease: bytes
    epoch: int


class ReceiveOpened(Message):
    """Reports that a handoff stream for the lease is open: the I/O process may write its pages."""

    key: int
    epoch: int


class ReceiveClosed(Message):
    """Reports that the streams of ``epoch`` are closed: no write of theirs is in flight any more."""

    key: int
    epoch: int


class IntakeClosed(Message):
    """Answers CloseReceive: no receive is open for the request, and none opens any more."""

    key: int


class BlocksReceived(Message):
    """Reports blocks, by index, that are verified and written; those in ``resident`` are on the device as well."""

    key: int
    epoch: int
    blocks: tuple[int, ...]
    resident: tuple[int, ...] = ()


class Commit(Message):
    """Asks to decode, since every block is in; answered by Committed or Ended. ``first`` is the prefill's token."""

    key: int
    epoch: int
    first: TokenRun
    cached_tokens: int


class Admitted(Message):
    """Answers Admit with a lease: ``pages[i]`` is block i's page, ``hashes[i]`` its chain hash, a tail's too.

    No token to come sees the blocks from ``unseen[0]`` to ``unseen[1] - 1``: nobody is to bring them.
    """

    key: int
    lease: bytes
    epoch: int
    held_blocks: int
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]
    unseen: tuple[int, int] = (0, 0)


class Refused(Message):
    """Answers an Admit or a Rearm that can't be done."""

    key: int
    error: ErrorInfo


class Rearmed(Message):
    """Answers Rearm with the epoch in force and the blocks that arrived under earlier ones."""

    key: int
    epoch: int
    received_blocks: tuple[int, ...]


class Committed(Message):
    """Answers Commit: the sequence joined the batch."""

    key: int
    epoch: int


class Output(Message):
    """Holds what one request gained in a step; the prompt's own results come with its first output."""

    key: int
    run: TokenRun
    cached_tokens: int = 0
    stations: tuple[Station, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""


class Tokens(Message):
    """Reports one engine step's outputs. A run with a finish_reason is the request's last: its lease is closed."""

    step: int
    outputs: tuple[Output, ...]


class Ended(Message):
    """Reports that the request ended unfinished and its lease is closed; ``error`` is None after a Cancel."""

    key: int
    error: ErrorInfo | None


class CloseReceive(Message):
    """Asks to stop writing the pages of a lease that the engine ended.

    Answered by ReceiveClosed for each epoch that had a stream open, then by IntakeClosed.
    """

    key: int
