"""Messages between a worker's two processes, over one local channel (see ``baton/worker/channel.py`` for framing).

The engine process owns the page pool, the leases and the step loop; the I/O process owns gRPC, the
handoff streams and the metrics. ``key`` is the I/O process's own number for one request. Nothing here
knows of sockets, asyncio or torch.

A message that asks is named by an imperative (Admit, Cancel), one that reports by the event's past tense or by what
it carries (Admitted, BlocksReceived, Tokens); classes elsewhere are named by nouns. The unions at the end say which
process receives which messages: whoever dispatches one covers its whole union.

A page's life between the two: the engine never reuses a page of a closed lease while the I/O process
may still read or write it. ``ReceiveOpened`` and ``BlocksReady`` take a hold, ``ReceiveClosed`` and ``SendClosed``
give it back; pages of a lease that closed meanwhile wait in quarantine. A lease's intake is open from ``Admitted``
until the I/O process sends ``Commit``, ``Cancel`` or ``IntakeClosed``: after these it opens no receive any more.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.protos.errors import ErrorInfo
from baton.protos.nouns import (
    AdapterInfo,
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
    """Base of every message: a tagged array, so that one decoder tells the members of a union apart."""


# ---- I/O -> engine, both roles ---------------------------------------------------------------------


class Cancel(_Message):
    """Asks to end the request now; answered by Ended (decode) or PrefillFailed (prefill) unless it ended already.

    On a decode worker the intake of the request is closed before this is sent.
    """

    key: int
    reason: str


class AskSnapshot(_Message):
    """Asks to count the pool; answered by SnapshotIs with the same ``ticket``."""

    ticket: int


class Drain(_Message):
    """Asks to take nothing new: further work is refused with the error Draining."""


class Shutdown(_Message):
    """Asks the engine to leave its loop and exit."""


class SetRole(_Message):
    """Asks to take nothing new and to go on in ``role`` once no request is left; answered by RoleIs."""

    role: str


class Pin(_Message):
    """Asks to pin the leading blocks of ``hashes`` that are cached, for a Fetch; answered by Pinned."""

    key: int
    hashes: tuple[bytes, ...]


class Unpin(_Message):
    """Ends the pin ``key``: the I/O process reads its pages no more."""

    key: int


class Keep(_Message):
    """Asks to evict none of ``hashes`` that are still cached until Unkeep; answered by Kept."""

    key: int
    hashes: tuple[bytes, ...]


class Unkeep(_Message):
    """Ends the keep ``key``: its blocks were copied and may be evicted."""

    key: int


class Fill(_Message):
    """Asks for pages for the leading blocks ``hashes``, whose bytes come from elsewhere; answered by Filling."""

    key: int
    hashes: tuple[bytes, ...]


class Filled(_Message):
    """Reports that the first ``blocks`` of a Fill are written and verified; the other pages go back to the pool."""

    key: int
    blocks: int


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """Says which adapter is meant: its name, its directory (strictly beneath ``root``, where there is one), and the
    digest of its content, empty for whatever is there.
    """

    name: str
    path: str
    root: str = ""
    digest: str = ""


class LoadAdapter(_Message):
    """Asks to hold an adapter; answered by AdapterIs once requests may use it, or by AdapterFailed."""

    ticket: int
    source: AdapterPlace
    pinned: bool


class UnloadAdapter(_Message):
    """Asks to take no new request on ``adapter``, an id; answered by AdapterIs or AdapterFailed at once."""

    ticket: int
    adapter: str


class ListAdapters(_Message):
    """Asks for the adapters in memory; answered by AdaptersAre."""

    ticket: int


# ---- I/O -> engine, decode ---------------------------------------------------------------------------


class Admit(_Message):
    """Asks to reserve pages and to open a lease of ``ttl_s`` seconds; answered by Admitted or Refused.

    With ``local`` this worker reads the prompt itself; else another one hands its KV over.
    """

    key: int
    request: EngineRequest
    local: bool
    ttl_s: float


class Rearm(_Message):
    """Announces a second prefill under ``epoch``; answered by Rearmed or Refused."""

    key: int
    lease: bytes
    epoch: int


class ReceiveOpened(_Message):
    """Reports that a handoff stream for the lease is open: the I/O process may write its pages."""

    key: int
    epoch: int


class ReceiveClosed(_Message):
    """Reports that the streams of ``epoch`` are closed: no write of theirs is in flight any more."""

    key: int
    epoch: int


class IntakeClosed(_Message):
    """Answers CloseReceive: no receive is open for the request, and none opens any more."""

    key: int


class BlocksReceived(_Message):
    """Reports blocks, by index, that are verified and written; those in ``resident`` are on the device as well."""

    key: int
    epoch: int
    blocks: tuple[int, ...]
    resident: tuple[int, ...] = ()


class Commit(_Message):
    """Asks to decode, since every block is in; answered by Committed or Ended. ``first`` is the prefill's token."""

    key: int
    epoch: int
    first: TokenRun
    cached_tokens: int


# ---- I/O -> engine, prefill --------------------------------------------------------------------------


class Prefill(_Message):
    """Asks to compute a prompt. Blocks below ``held_blocks`` and those in ``received_blocks`` need no shipping."""

    key: int
    request: EngineRequest
    held_blocks: int
    received_blocks: tuple[int, ...]


class SendClosed(_Message):
    """Reports that the request's handoff is over, so that its pages need no pin any more."""

    key: int


# ---- engine -> I/O, both roles -----------------------------------------------------------------------


class EngineReady(_Message):
    """Reports that the model is loaded and the pool exists; the I/O process may advertise the worker.

    ``device_pages`` mirror the pages, byte for byte at the same places, where the engine runs on a card and shares
    them. The engine hears of what is written there by ReceiveOpened and BlocksReceived.
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
    adapters: tuple[str, ...] = ()


class EngineFailed(_Message):
    """Reports that the engine can't start; it exits after this."""

    error: ErrorInfo


class SnapshotIs(_Message):
    """Answers AskSnapshot with the pool's counts."""

    ticket: int
    snapshot: PoolSnapshot


class AdapterIs(_Message):
    """Answers LoadAdapter and UnloadAdapter with the adapter as it is then."""

    ticket: int
    adapter: AdapterInfo


class AdapterFailed(_Message):
    """Answers a LoadAdapter or UnloadAdapter that can't be done."""

    ticket: int
    error: ErrorInfo


class AdaptersAre(_Message):
    """Answers ListAdapters with every adapter in memory, the least recently used first."""

    ticket: int
    adapters: tuple[AdapterInfo, ...]


class AdaptersChanged(_Message):
    """Reports the ids of the adapters that take requests from now on, sorted."""

    adapters: tuple[str, ...]


class RoleIs(_Message):
    """Reports that the engine plays ``role`` now, with the same weights, pages and cached blocks and no request."""

    role: str


class CacheChanged(_Message):
    """Reports full blocks that became findable in this worker's cache, and those that are gone."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class Stats(_Message):
    """Reports load and recent cost samples, at most ten times a second and after the last step of a burst.

    Counts of steps, tokens, preemptions and swept leases are totals since the start.
    """

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
    drafts: int = 0
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    draft_seconds: float = 0.0


class Pinned(_Message):
    """Answers Pin with the pages of the leading blocks that are cached here; they are pinned until Unpin."""

    key: int
    pages: tuple[int, ...]


class Kept(_Message):
    """Answers Keep: which of the blocks are here, and in which pages."""

    key: int
    hashes: tuple[bytes, ...]
    pages: tuple[int, ...]


class CacheIdle(_Message):
    """Reports blocks that nobody leases any more, a chain's tail first; sent only where there are lower tiers."""

    hashes: tuple[bytes, ...]


class Filling(_Message):
    """Answers Fill: block i goes to ``pages[i]``, and the first ``held`` are here already. No pages mean no room.

    Only the I/O process touches the pages from ``held`` on, until it sends Filled.
    """

    key: int
    held: int
    pages: tuple[int, ...]


# ---- engine -> I/O, decode ---------------------------------------------------------------------------


class Admitted(_Message):
    """Answers Admit with a lease: ``pages[i]`` is block i's page, ``hashes[i]`` its chain hash, a tail's too."""

    key: int
    lease: bytes
    epoch: int
    held_blocks: int
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]


class Refused(_Message):
    """Answers an Admit or a Rearm that can't be done."""

    key: int
    error: ErrorInfo


class Rearmed(_Message):
    """Answers Rearm with the epoch in force and the blocks that arrived under earlier ones."""

    key: int
    epoch: int
    received_blocks: tuple[int, ...]


class Committed(_Message):
    """Answers Commit: the sequence joined the batch."""

    key: int
    epoch: int


class Output(_Message):
    """Holds what one request gained in a step; the prompt's own results come with its first output."""

    key: int
    run: TokenRun
    cached_tokens: int = 0
    stations: tuple[Station, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""


class Tokens(_Message):
    """Reports one engine step's outputs. A run with a finish_reason is the request's last: its lease is closed."""

    step: int
    outputs: tuple[Output, ...]


class Ended(_Message):
    """Reports that the request ended unfinished and its lease is closed; ``error`` is None after a Cancel."""

    key: int
    error: ErrorInfo | None


class CloseReceive(_Message):
    """Asks to stop writing the pages of a lease that the engine ended.

    Answered by ReceiveClosed for each epoch that had a stream open, then by IntakeClosed.
    """

    key: int


# ---- engine -> I/O, prefill --------------------------------------------------------------------------


class ShipBlock(msgspec.Struct, frozen=True, array_like=True):
    """Names one finished block to push: its index in the prompt, its page here, its hash, the tokens it holds.

    With ``resident`` its page on the device holds it as well, until SendClosed.
    """

    index: int
    page: int
    hash: bytes
    tokens: int
    resident: bool = False


class BlocksReady(_Message):
    """Reports finished blocks, in order; their pages are pinned until SendClosed."""

    key: int
    blocks: tuple[ShipBlock, ...]


class PrefillDone(_Message):
    """Reports the first token, after every block was announced. ``at``: monotonic seconds when it was known."""

    key: int
    first: TokenRun
    cached_tokens: int
    stations: tuple[Station, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    at: float | None = None


class PrefillFailed(_Message):
    """Reports that the prompt was not computed, because of an error or a cancel."""

    key: int
    error: ErrorInfo


# ---- who receives what -------------------------------------------------------------------------------

ToEitherEngine = (
    AskSnapshot | Drain | Shutdown | SetRole | Pin | Unpin | Keep | Unkeep | Fill | Filled
    | LoadAdapter | UnloadAdapter | ListAdapters
)  # fmt: skip
ToDecodeEngine = (
    ToEitherEngine | Cancel | Admit | Rearm | ReceiveOpened | ReceiveClosed | IntakeClosed | BlocksReceived | Commit
)  # fmt: skip
ToPrefillEngine = ToEitherEngine | Cancel | Prefill | SendClosed
ToEngine = ToDecodeEngine | ToPrefillEngine

FromDecodeEngine = Admitted | Refused | Rearmed | Committed | Tokens | Ended | CloseReceive
FromPrefillEngine = BlocksReady | PrefillDone | PrefillFailed
FromEitherRole = FromDecodeEngine | FromPrefillEngine
FromCache = Pinned | Kept | Filling | CacheChanged | CacheIdle
FromAdapters = AdapterIs | AdapterFailed | AdaptersAre | AdaptersChanged
ToIo = FromEitherRole | FromCache | FromAdapters | EngineReady | EngineFailed | SnapshotIs | RoleIs | Stats

SendToEngine = Callable[[ToEngine], None]
"""Hands the engine a message; it never blocks."""
