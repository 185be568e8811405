"""Channel messages about a decode worker's requests: leases, KV blocks received for them, and the tokens generated.

``epoch`` counts a lease's prefills; blocks of an earlier epoch are refused.
"""

from __future__ import annotations

from baton.protos.channel.message import Message
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import EngineRequest, Station, TokenLogprobs, TokenRun


class Admit(Message):
    """Asks to reserve pages for a request under a lease of ``ttl_s`` seconds; answered by Admitted or Refused.

    With ``local`` this worker prefills the prompt itself; else a prefill worker sends its KV.
    """

    key: int
    request: EngineRequest
    local: bool
    ttl_s: float


class Rearm(Message):
    """Announces a second prefill, under the new ``epoch``; answered by Rearmed or Refused."""

    key: int
    lease: bytes
    epoch: int


class ReceiveOpened(Message):
    """Reports that a handoff stream for the lease is open: the I/O process may write its pages."""

    key: int
    epoch: int


class ReceiveClosed(Message):
    """Reports that the streams of ``epoch`` are closed: none of them writes pages any more."""

    key: int
    epoch: int


class IntakeClosed(Message):
    """Answers CloseReceive: no stream of the request is open, and none will be opened."""

    key: int


class BlocksReceived(Message):
    """Reports blocks, by index, that are verified and written; those in ``resident`` are on the device, too."""

    key: int
    epoch: int
    blocks: tuple[int, ...]
    resident: tuple[int, ...] = ()


class Commit(Message):
    """Asks to begin decoding, because every block is received; answered by Committed or Ended.

    ``first`` is the token that the prefill generated.
    """

    key: int
    epoch: int
    first: TokenRun
    cached_tokens: int


class Admitted(Message):
    """Answers Admit with a lease: ``pages[i]`` is block i's page, ``hashes[i]`` its chain hash, a partial last
    block included.

    The first ``held_blocks`` blocks are cached already. Attention sees none of blocks ``unseen[0]`` to ``unseen[1]
    - 1`` (sparse attention), so they need not be sent. The first ``slots`` blocks are chosen by the prefill
    worker (SnapKV), all of them at once.
    """

    key: int
    lease: bytes
    epoch: int
    held_blocks: int
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]
    unseen: tuple[int, int] = (0, 0)
    slots: int = 0


class Refused(Message):
    """Answers an Admit or Rearm that is refused, with the reason."""

    key: int
    error: ErrorInfo


class Rearmed(Message):
    """Answers Rearm with the epoch now in force and the indices of blocks that arrived under earlier ones."""

    key: int
    epoch: int
    received_blocks: tuple[int, ...]


class Committed(Message):
    """Answers Commit: the request is in the decode batch."""

    key: int
    epoch: int


class Output(Message):
    """Holds one request's outputs of one engine step; the prompt's logprobs and pooled state come with its first
    output.
    """

    key: int
    run: TokenRun
    cached_tokens: int = 0
    stations: tuple[Station, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""


class Tokens(Message):
    """Reports the outputs of engine step number ``step``.

    A run with a finish_reason is the request's last: its lease is closed.
    """

    step: int
    outputs: tuple[Output, ...]


class Ended(Message):
    """Reports that a request ended before its answer was complete, and its lease is closed; ``error`` is None after
    a Cancel.
    """

    key: int
    error: ErrorInfo | None


class CloseReceive(Message):
    """Asks to stop writing the pages of a lease that the engine has ended.

    Answered by ReceiveClosed for each epoch that had a stream open, then by IntakeClosed.
    """

    key: int
