"""Messages between a worker's two processes, over one local channel (see ``baton/worker/channel.py`` for framing).

The engine process owns the page pool, the leases and the step loop; the I/O process owns gRPC, the
handoff streams and the metrics. ``key`` is the I/O process's own number for one request. Nothing here
knows of sockets, asyncio or torch.

A page's life between the two: the engine never reuses a page of a closed lease while the I/O process
may still read or write it. ``ReceiveOpened``/``SendOpened`` take a hold, ``ReceiveClosed``/``SendClosed``
give it back; pages of a lease that closed meanwhile wait in quarantine.
"""

from __future__ import annotations

import msgspec

from baton.protos.errors import ErrorInfo
from baton.protos.nouns import (
    EngineRequest,
    EngineWork,
    KvLayout,
    PoolSnapshot,
    SharedPages,
    Station,
    StepSample,
    TokenLogprobs,
    TokenRun,
)


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A tagged member of the unions below."""


# ---- I/O -> engine, both roles ---------------------------------------------------------------------


class Cancel(_Message):
    """End the request now; answered by Ended (decode) or PrefillFailed (prefill) unless it already ended."""

    key: int
    reason: str


class AskSnapshot(_Message):
    """Count the pool; answered by SnapshotIs. ``ticket`` pairs question and answer."""

    ticket: int


class Drain(_Message):
    """Take nothing new. New work is refused with Draining."""


class Shutdown(_Message):
    """Leave the loop and exit."""


class SetRole(_Message):
    """Take nothing new; once nothing of this role is left, go on in ``role``; answered by RoleIs."""

    role: str


class Pin(_Message):
    """Hold the leading cached blocks among ``hashes`` for a Fetch; answered by Pinned."""

    key: int
    hashes: tuple[bytes, ...]


class Unpin(_Message):
    """The Fetch is over."""

    key: int


class Keep(_Message):
    """Let cached blocks be copied: those still here aren't evicted until Unkeep; answered by Kept."""

    key: int
    hashes: tuple[bytes, ...]


class Unkeep(_Message):
    """The copies are made."""

    key: int


class Fill(_Message):
    """Pages for the leading blocks ``hashes``, whose bytes come from elsewhere; answered by Filling."""

    key: int
    hashes: tuple[bytes, ...]


class Filled(_Message):
    """The first ``blocks`` of a Fill are written and verified: findable now. The others' pages go back."""

    key: int
    blocks: int


# ---- I/O -> engine, decode ---------------------------------------------------------------------------


class Admit(_Message):
    """Reserve pages and open a lease; answered by Admitted or Refused."""

    key: int
    request: EngineRequest
    local: bool
    ttl_s: float


class Rearm(_Message):
    """A second prefill will come under ``epoch``; answered by Rearmed or Refused."""

    key: int
    lease: bytes
    epoch: int


class ReceiveOpened(_Message):
    """A handoff stream for the lease is open: the I/O process may write its pages."""

    key: int
    epoch: int


class ReceiveClosed(_Message):
    """That stream is closed: no write is in flight any more."""

    key: int
    epoch: int


class BlocksReceived(_Message):
    """Verified and written, by block index. ``resident``: those of them that are on the device, too."""

    key: int
    epoch: int
    blocks: tuple[int, ...]
    resident: tuple[int, ...] = ()


class Commit(_Message):
    """Every block is in: decode from here. ``first`` is the prefill's token. Answered by Committed or Ended."""

    key: int
    epoch: int
    first: TokenRun
    cached_tokens: int


# ---- I/O -> engine, prefill --------------------------------------------------------------------------


class Prefill(_Message):
    """Compute a prompt. Blocks below ``held_blocks`` and those in ``received_blocks`` need no shipping."""

    key: int
    request: EngineRequest
    held_blocks: int
    received_blocks: tuple[int, ...]


class SendClosed(_Message):
    """Everything of the request was acknowledged, or its handoff ended: its pages need no pin any more."""

    key: int


# ---- engine -> I/O, both roles -----------------------------------------------------------------------


class EngineReady(_Message):
    """The model is loaded and the pool exists; the I/O process may advertise.

    ``device_pages`` mirror the pages, byte for byte at the same places, where the engine runs on a card and shares
    them. It is told of what is written there: ReceiveOpened, BlocksReceived.
    """

    layout: KvLayout
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pages: int
    max_batch: int
    work: EngineWork | None = None
    device_pages: SharedPages | None = None


class EngineFailed(_Message):
    """The engine can't start; it exits after this."""

    error: ErrorInfo


class SnapshotIs(_Message):
    """Answers AskSnapshot."""

    ticket: int
    snapshot: PoolSnapshot


class RoleIs(_Message):
    """The engine plays ``role`` from now on: with the same weights, pages and cached blocks, and no request."""

    role: str


class CacheChanged(_Message):
    """Full blocks that became findable in this worker's cache, and those that are gone."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class Stats(_Message):
    """Load and recent cost samples, at most ten times a second and after the last step of a burst."""

    step: int
    running: int
    waiting: int
    waiting_tokens: int
    free_pages: int
    cached_pages: int
    leased_pages: int
    preemptions: int
    leases_swept: int
    tokens_prefilled: int
    tokens_decoded: int
    prefix_hit_tokens: int
    prefix_asked_tokens: int
    step_seconds_p50: float
    samples: tuple[StepSample, ...] = ()
    busy_seconds: float = 0.0
    prefill_pairs: float = 0.0
    decode_context: int = 0


class Pinned(_Message):
    """Pages of the leading blocks that are cached here; pinned until Unpin."""

    key: int
    pages: tuple[int, ...]


class Kept(_Message):
    """Which of the asked blocks are here, and where."""

    key: int
    hashes: tuple[bytes, ...]
    pages: tuple[int, ...]


class CacheIdle(_Message):
    """Blocks nobody leases any more, a chain's tail first; told only by a worker that has lower tiers."""

    hashes: tuple[bytes, ...]


class Filling(_Message):
    """Block i goes to ``pages[i]``; the first ``held`` are here already. No pages: there is no room now.

    Only the I/O process touches the pages from ``held`` on, until it says Filled.
    """

    key: int
    held: int
    pages: tuple[int, ...]


# ---- engine -> I/O, decode ---------------------------------------------------------------------------


class Admitted(_Message):
    """The lease. ``pages[i]`` is block i's page, ``hashes[i]`` its chain hash (the tail's covers its tokens)."""

    key: int
    lease: bytes
    epoch: int
    held_blocks: int
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]


class Refused(_Message):
    """Admit or Rearm can't be done."""

    key: int
    error: ErrorInfo


class Rearmed(_Message):
    """The epoch in force, and the blocks that arrived under earlier ones."""

    key: int
    epoch: int
    received_blocks: tuple[int, ...]


class Committed(_Message):
    """The sequence joined the batch."""

    key: int
    epoch: int


class Output(_Message):
    """What one request gained since the last frame."""

    key: int
    run: TokenRun
    cached_tokens: int = 0
    stations: tuple[Station, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""


class Tokens(_Message):
    """One engine step's outputs. A run with a finish_reason is the request's last: its lease is closed."""

    step: int
    outputs: tuple[Output, ...]


class Ended(_Message):
    """The request ended without finishing; its lease is closed. ``error`` is None for an asked-for cancel."""

    key: int
    error: ErrorInfo | None


class CloseReceive(_Message):
    """The lease is closed: stop writing its pages, then answer ReceiveClosed if a receive was open."""

    key: int


# ---- engine -> I/O, prefill --------------------------------------------------------------------------


class ShipBlock(msgspec.Struct, frozen=True, array_like=True):
    """One finished block to push: its index in the prompt, its page here, its hash, tokens it holds (1..16).

    ``resident``: its page on the device holds it as well, until SendClosed.
    """

    index: int
    page: int
    hash: bytes
    tokens: int
    resident: bool = False


class BlocksReady(_Message):
    """Finished blocks, in order; pinned until SendClosed."""

    key: int
    blocks: tuple[ShipBlock, ...]


class PrefillDone(_Message):
    """The first token; every block was announced before this. ``at``: known since then, by the host's clock."""

    key: int
    first: TokenRun
    cached_tokens: int
    stations: tuple[Station, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    at: float | None = None


class PrefillFailed(_Message):
    """The prompt was not computed (error, or cancel)."""

    key: int
    error: ErrorInfo


ToEngine = (
    Cancel | AskSnapshot | Drain | Shutdown | Admit | Rearm | ReceiveOpened | ReceiveClosed | BlocksReceived
    | Commit | Prefill | SendClosed | Pin | Unpin | Keep | Unkeep | Fill
    | Filled | SetRole
)  # fmt: skip
ToIo = (
    EngineReady | EngineFailed | SnapshotIs | CacheChanged | Stats | Admitted | Refused | Rearmed | Committed
    | Tokens | Ended | CloseReceive | BlocksReady | PrefillDone | PrefillFailed | Pinned | Kept
    | CacheIdle | Filling | RoleIs
)  # fmt: skip
