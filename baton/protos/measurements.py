"""Defines what a worker measures of itself and reports: its load, cost curves, links and drafts, as frozen structs.

Knows nothing of gRPC, torch or how a figure is taken. ``convert.py`` turns what crosses the wire into protobuf.
"""

from __future__ import annotations

import msgspec


class SpeculationTotals(msgspec.Struct, frozen=True, array_like=True):
    """Counts the results of speculative decoding since an engine's start.

    ``sequence_steps`` are decode steps times sequences; ``judged[i]`` and ``accepted[i]`` are drafted tokens at
    place i of their draft that were verified, and accepted. ``tokens`` and ``seconds`` are those of steps that may
    draft, then those of the control steps that may not (``speculation_control_share``). ``read_ahead`` are tokens
    of prompts that speculators read while their KV was on its way.
    """

    sequence_steps: int = 0
    judged: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)
    read_ahead: int = 0

    @property
    def gain(self) -> float:
        """Returns tokens per second with drafts over tokens per second without; 0 while either is unknown."""
        if not all(self.tokens) or not all(self.seconds):
            return 0.0
        return self.tokens[0] / self.seconds[0] / (self.tokens[1] / self.seconds[1])


class ExpertCopies(msgspec.Struct, frozen=True, array_like=True):
    """Describes the copies of busy experts that ranks have, as of the last look at what goes to experts.

    An imbalance is the busiest rank's rows divided by the mean over ranks, summed over layers, and 0 before the
    first look.
    """

    copies: int = 0  # that compute rows, in all layers
    moves: int = 0  # copies that were made since the start
    imbalance_at_home: float = 0.0  # if there were no copies
    imbalance: float = 0.0


class ExpertRows(msgspec.Struct, frozen=True):
    """Counts token rows that experts computed in all layers since the start."""

    by_rank: tuple[int, ...]
    by_expert: tuple[int, ...]
    copies: ExpertCopies = ExpertCopies()


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """Counts token rows that experts computed since the engine took its role."""

    rows: tuple[int, ...] = ()  # by rank
    busiest: int = 0  # rows of the busiest expert
    experts: int = 0  # number of experts
    copies: ExpertCopies = ExpertCopies()

    @property
    def imbalance(self) -> float:
        """Returns the busiest expert's rows divided by the mean over experts; 0 before there were any."""
        total = sum(self.rows)
        return self.busiest * self.experts / total if total else 0.0


class AdapterRowCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts the rows of a step that are on LoRA adapters, and the different adapters in it.

    ``row_ranks`` and ``adapter_ranks`` are the sums of their adapters' ranks: over rows, and over adapters.
    """

    rows: int
    row_ranks: int
    adapters: int
    adapter_ranks: int


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """Describes the content and duration of one engine step; cost curves are fitted on these.

    ``prefill_attention`` is the sum over prefill chunks of new x (context before + new / 2), in token pairs;
    ``decode_context`` the sum over decoding sequences of the context tokens that each reads. ``draft_tokens`` are
    rows of decoding sequences beyond their first. ``adapted`` is None where no row is on an adapter, or nobody
    asked.
    """

    prefill_tokens: int
    prefill_attention: float
    decode_sequences: int
    decode_context: int
    seconds: float
    draft_tokens: int = 0
    adapted: AdapterRowCounts | None = None


class StepCurve(msgspec.Struct, frozen=True, array_like=True):
    """Predicts the seconds of a step: ``fixed`` + the four terms of a StepSample, each times its coefficient."""

    fixed: float
    prefill_token: float
    prefill_pair: float
    decode_sequence: float
    decode_context_token: float


class AdapterCurve(msgspec.Struct, frozen=True, array_like=True):
    """Predicts the seconds that LoRA adapters add to a step: the rows' ranks times ``row``, and the different
    adapters' ranks times ``adapter``.

    ``rank`` is the mean rank of the rows that it was measured on.
    """

    row: float
    adapter: float
    rank: float


class TransferCurve(msgspec.Struct, frozen=True, array_like=True):
    """Predicts the seconds to send bytes: ``fixed`` + bytes x ``per_byte``."""

    fixed: float
    per_byte: float


class KvLink(msgspec.Struct, frozen=True, array_like=True):
    """Describes how a worker sends KV to worker ``peer``, as measured by its preflight; ``fallback`` says why not
    by a better transport, or is "".

    ``bytes_per_s`` is the bandwidth, ``fixed_s`` the seconds per transfer regardless of size.
    """

    peer: str
    transport: str
    bytes_per_s: float
    fixed_s: float
    fallback: str = ""


class SharedPages(msgspec.Struct, frozen=True, array_like=True):
    """Names an engine's KV pages on its GPU, for another process of the same user: the GPU, the driver's IPC
    handle, bytes. ``mirrored``: whoever writes such a page writes the host's as well.
    """

    card: str
    handle: bytes
    size: int
    mirrored: bool = True


class KvPair(msgspec.Struct, frozen=True, array_like=True):
    """Counts the KV that a worker has sent to worker ``peer`` since its start; ``bytes_per_s`` is of the last
    seconds.

    ``why``: the last error, while ``peer`` can't be reached or handoffs to it fail one after another; else "".
    """

    peer: str
    transfers: int = 0
    failures: int = 0
    bytes: int = 0
    bytes_per_s: float = 0.0
    why: str = ""


class EngineWork(msgspec.Struct, frozen=True, array_like=True):
    """Describes the cost of a step and the machine's peak rates, from which MFU and MBU are computed.

    Of a paced engine all figures are in seconds at its profile's ceiling, and the peaks are 1.
    """

    token_flops: float  # operations per computed token
    sample_flops: float  # operations per sampled token
    pair_flops: float  # operations per (query, key) pair
    step_bytes: float  # bytes that any step reads: the weights
    context_bytes: float  # bytes read per token of context by layers that see all of it
    peak_flops: float  # operations per second, measured at start
    peak_bytes: float  # bytes per second, measured at start
    windows: tuple[tuple[int, float], ...] = ()  # of layers with a window: its tokens, and bytes read per token


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes how busy a worker is: the changing part of its membership entry, which may be seconds old.

    Rates, ``busy``, MFU, MBU and watts are of the last seconds; counts are since the engine's start.
    """

    running: int = 0  # sequences in the batch
    waiting: int = 0  # sequences that wait for the batch
    waiting_tokens: int = 0  # prompt tokens not computed yet
    free_pages: int = 0  # of the KV page pool
    cached_pages: int = 0  # that hold cached blocks and may be evicted
    leased_pages: int = 0  # that requests use
    steps: int = 0
    step_curve: StepCurve | None = None
    transfer_curve: TransferCurve | None = None  # of its handoffs to decode workers
    kv_links: tuple[KvLink, ...] = ()
    fetch_curve: TransferCurve | None = None  # of its fetches of cached blocks from other workers
    kv_pairs: tuple[KvPair, ...] = ()
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    busy: float = 0.0  # share of time inside steps; one sequence keeps a decode worker at 1
    prefix_hits: int = 0  # prompt tokens found in its prefix cache
    prefix_queries: int = 0  # prompt tokens looked up in its prefix cache
    preemptions: int = 0  # sequences put back to make room
    mfu: float | None = None  # model FLOPs utilization, 0 to 1
    mbu: float | None = None  # memory bandwidth utilization, 0 to 1
    watts: float | None = None  # of the whole machine
    speculation: SpeculationTotals | None = None
    adapter_curve: AdapterCurve | None = None  # None until steps with and without adapters were seen
    bare_curve: StepCurve | None = None  # of its steps apart from what adapters add; known with adapter_curve
