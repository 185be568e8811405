"""Channel messages that both roles share: start, end, change of role, cancel, counts, load."""

from __future__ import annotations

import msgspec

from baton.protos.channel.message import Message
from baton.protos.errors import ErrorInfo
from baton.protos.measurements import EngineWork, ExpertLoad, SharedPages, SpeculationTotals, StepSample
from baton.protos.nouns import Extent, KvLayout, PoolSnapshot


class Cancel(Message):
    """Asks to end the request now; answered by Ended (decode) or PrefillFailed (prefill) unless it ended already.

    On a decode worker the intake of the request is closed before this is sent.
    """

    key: int
    reason: str


class AskSnapshot(Message):
    """Asks for the page pool's counts; answered by SnapshotIs with the same ``ticket``."""

    ticket: int


class Drain(Message):
    """Asks to accept no new work: it is refused with the error Draining."""


class Shutdown(Message):
    """Asks the engine process to end its loop and exit."""


class SetRole(Message):
    """Asks to accept no new work, and to change to ``role`` ("prefill" or "decode") once no request is left;
    answered by RoleIs.
    """

    role: str


class HostSender(msgspec.Struct, frozen=True, array_like=True):
    """Says that a host of a worker's ranks sends or receives KV: where it listens, the token that proves its lead,
    and its part of each page. The lead's own host has no address. ``name`` is its entry of worker.rank_hosts.
    """

    address: str
    token: bytes
    part: tuple[Extent, ...]
    name: str = ""


class EngineReady(Message):
    """Reports that the model is loaded and the page pool exists; the I/O process may announce the worker.

    ``senders`` are the hosts that each send a part of every page, the lead's first; () if it sends all.
    ``receivers`` are the hosts that each receive what they read of every page, in the same way.

    ``device_pages``, if the engine runs on a GPU and shares them, mirror the host's pages byte for byte at the same
    offsets. The engine learns of writes there by ReceiveOpened and BlocksReceived.
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
    senders: tuple[HostSender, ...] = ()
    receivers: tuple[HostSender, ...] = ()


class EngineFailed(Message):
    """Reports that the engine can't start; its process exits after this message."""

    error: ErrorInfo


class SnapshotIs(Message):
    """Answers AskSnapshot with the pool's counts."""

    ticket: int
    snapshot: PoolSnapshot


class RoleIs(Message):
    """Reports that the engine has changed to ``role``, with the same weights, pages and cached blocks, and without
    any request; with ``error``, that it plays its former role on, because the other one couldn't begin.
    """

    role: str
    error: ErrorInfo | None = None


class Stats(Message):
    """Reports load and recent cost samples, at most ten times a second and after the last step of a burst.

    Counts of steps, tokens, preemptions and swept leases are totals since the engine's start.
    """

    step: int  # engine steps
    running: int  # sequences in the batch
    waiting: int  # sequences that wait for the batch
    waiting_tokens: int  # prompt tokens not computed yet
    free_pages: int  # of the KV page pool
    cached_pages: int  # that hold cached blocks and may be evicted
    leased_pages: int  # that requests use
    preemptions: int  # sequences put back to make room
    leases_swept: int  # leases ended because their TTL ran out
    tokens_prefilled: int  # prompt tokens computed
    tokens_decoded: int
    prefix_hit_tokens: int  # prompt tokens found in the prefix cache
    prefix_asked_tokens: int  # prompt tokens looked up in the prefix cache
    step_seconds_p50: float  # of the last 512 steps
    samples: tuple[StepSample, ...] = ()  # steps since the last Stats
    busy_seconds: float = 0.0  # inside steps
    prefill_pairs: float = 0.0  # query-key pairs of prefill
    decode_context: int = 0  # context tokens read by decode steps
    drafts: int = 0  # drafts verified, one per sequence and step
    draft_tokens: int = 0  # drafted tokens verified
    draft_tokens_accepted: int = 0
    draft_seconds: float = 0.0  # spent making drafts
    speculation: SpeculationTotals | None = None
    expert_load: ExpertLoad | None = None
    steps_ahead: int = 0  # steps planned while the one before them ran
    rows_discarded: int = 0  # rows of such steps whose sequences had ended by then
