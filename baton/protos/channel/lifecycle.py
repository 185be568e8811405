"""What both roles' engines are told and tell of themselves: start, end, role, counts, load."""

from __future__ import annotations

from baton.protos.channel.message import Message
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import (
    EngineWork,
    ExpertLoad,
    KvLayout,
    PoolSnapshot,
    SharedPages,
    SpeculationTotals,
    StepSample,
)


class Cancel(Message):
    """Asks to end the request now; answered by Ended (decode) or PrefillFailed (prefill) unless it ended already.

    On a decode worker the intake of the request is closed before this is sent.
    """

    key: int
    reason: str


class AskSnapshot(Message):
    """Asks to count the pool; answered by SnapshotIs with the same ``ticket``."""

    ticket: int


class Drain(Message):
    """Asks to take nothing new: further work is refused with the error Draining."""


class Shutdown(Message):
    """Asks the engine to leave its loop and exit."""


class SetRole(Message):
    """Asks to take nothing new and to go on in ``role`` once no request is left; answered by RoleIs."""

    role: str


class EngineReady(Message):
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


class EngineFailed(Message):
    """Reports that the engine can't start; it exits after this."""

    error: ErrorInfo


class SnapshotIs(Message):
    """Answers AskSnapshot with the pool's counts."""

    ticket: int
    snapshot: PoolSnapshot


class RoleIs(Message):
    """Reports that the engine plays ``role`` now, with the same weights, pages and cached blocks and no request."""

    role: str


class Stats(Message):
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
    speculation: SpeculationTotals | None = None
    expert_load: ExpertLoad | None = None
