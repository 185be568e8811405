"""The nouns of the wire as frozen structs: what the rest of the house passes around instead of protobuf.

Knows nothing of gRPC, torch or any process. ``convert.py`` turns each into its protobuf twin and back.
"""

from __future__ import annotations

import msgspec

from baton.protos.version import PROTOCOL as PROTOCOL
from baton.protos.version import product_version

BLOCK_TOKENS = 16
MAX_LOGPROBS = 20
POOLINGS = ("mean", "last")
# A JSON schema; a regular expression; a JSON array of strings; an EBNF grammar (GBNF or Lark).
GRAMMAR_KINDS = ("json_schema", "regex", "choice", "grammar")
MAX_GRAMMAR_BYTES = 64 << 10
TENANT_SALT_BYTES = 16  # of a key's tenant, at the start of ``tenant_salt``; a client's own follows


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Says what an answer must match, as text of one of GRAMMAR_KINDS and of MAX_GRAMMAR_BYTES at most."""

    kind: str
    spec: str


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says how the next token is chosen, with every default filled in. Ranges are checked by the router.

    ``max_drafts``: drafted tokens that one step may verify, 0 for no speculation, None for as many as pay.
    ``logprob_token_ids``: with ``logprobs``, the tokens whose likelihoods stand in the alternatives' place.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    pooling: str = ""
    max_drafts: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def penalised(self) -> bool:
        """Tells whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Holds ln p of one token under the raw logits; rank 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Holds the emitted token's logprob and the likeliest alternatives, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TokenRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds consecutive outputs of one choice; ``output_index`` is the first one's absolute index.

    ``accepted_drafts`` of the tokens were drafted; ``rejected_drafts`` more were drafted and are not among them.
    """

    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""
    stop_token_id: int | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class Station(msgspec.Struct, frozen=True, array_like=True):
    """Seconds spent at one station of the way, by the reporting process's own clock."""

    name: str
    seconds: float


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers whose KV planes share a block table. ``window`` in tokens, 0 for unbounded."""

    kind: str
    planes: tuple[str, ...]
    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0


class StatePlane(msgspec.Struct, frozen=True):
    """Describes one kind of recurrent state of a sequence: ``shape`` float32 numbers in each layer."""

    name: str
    layers: int
    shape: tuple[int, ...]


class KvLayout(msgspec.Struct, frozen=True):
    """Says how one shard's pages hold KV. ``page_bytes`` is one page (``block_tokens`` tokens, all layers).

    A page of more than 16 tokens is runs of 16 in a row, each laid out as a page of 16 (kv/layout/page.py).
    ``states`` are the planes of a sequence's recurrent state, which lies in pages of its own (kv/layout/state.py).
    """

    dtype: str
    groups: tuple[LayerGroup, ...]
    page_bytes: int
    fidelity: str
    block_tokens: int = BLOCK_TOKENS
    shard_rank: int = 0
    shard_count: int = 1
    version: int = 1
    states: tuple[StatePlane, ...] = ()

    @property
    def runs(self) -> int:
        """Returns how many runs of 16 tokens a page has."""
        return self.block_tokens // BLOCK_TOKENS

    @property
    def run_bytes(self) -> int:
        """Returns the bytes of 16 tokens, all layers."""
        return self.page_bytes * BLOCK_TOKENS // max(1, self.block_tokens)


class WorkerInfo(msgspec.Struct, frozen=True):
    """Says who a worker is. ``fingerprint`` is hex SHA-256 of its weights.

    ``data_addresses`` says where its KV receivers listen, by transport, besides ``address`` (grpc); workers with
    one ``host_id`` run under one kernel. ``kv_backing`` is what that kernel gave for its pages
    (kv/memory/host_pages.py).
    """

    worker_id: str
    incarnation: str
    role: str
    address: str
    model_id: str
    fingerprint: str
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pages: int
    state: str = "ready"
    max_batch: int = 64
    device: str = "cpu"
    protocol: str = PROTOCOL
    adapters: tuple[str, ...] = ()
    metrics_address: str = ""
    host_id: str = ""
    data_addresses: dict[str, str] = {}
    kv_backing: str = ""
    version: str = ""  # of the build; empty where an older one doesn't say


def of_this_build(info: WorkerInfo) -> WorkerInfo:
    """Returns ``info`` with this build's version, which a worker says of itself; a default would be others' too."""
    return msgspec.structs.replace(info, version=product_version())


class AdapterInfo(msgspec.Struct, frozen=True):
    """Tells of a LoRA adapter that a worker holds; ``id`` is NAME@DIGEST (protos/adapter_id.py).

    ``rank`` is its matrices' largest, ``bytes`` what they take in memory, ``targets`` the last parts of the modules
    that it changes. ``running`` counts the sequences on it; one that is ``leaving`` takes no new ones.
    """

    id: str
    path: str
    rank: int
    bytes: int
    targets: tuple[str, ...] = ()
    pinned: bool = False
    running: int = 0
    leaving: bool = False


class AdapterLimits(msgspec.Struct, frozen=True):
    """Says how many adapters a worker holds at most, what their matrices may take, and one's largest rank.

    ``root`` is the directory beneath which adapters may be loaded while it runs; empty where none may.
    """

    max_loaded: int
    max_bytes: int
    max_rank: int
    root: str = ""


class PoolSnapshot(msgspec.Struct, frozen=True):
    """Counts the page pool. At baseline nothing is leased and nothing quarantined."""

    pages: int
    free: int
    cached: int
    leased: int
    quarantined: int
    leases: int
    leases_swept: int = 0
    running: int = 0
    waiting: int = 0
    incarnation: str = ""
    step_seconds_p50: float = 0.0
    steps: int = 0

    @property
    def at_baseline(self) -> bool:
        """Tells whether nothing is leased and nothing waits in quarantine."""
        return self.leased == 0 and self.quarantined == 0 and self.leases == 0


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds what an engine needs of a request: ``token_ids`` is the prompt, then outputs emitted before.

    ``prediction`` is what the client thinks that the answer will be, for speculation to look in. ``retained``: it
    means to use the prefix again, which weighs when blocks are evicted and changes no token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: Sampling
    choice: int = 0
    adapter_id: str = ""
    tenant_salt: bytes = b""
    priority: int = 0
    prediction: tuple[int, ...] = ()
    retained: bool = False

    @property
    def replayed(self) -> int:
        """Returns how many outputs were emitted before; the next output has this index."""
        return len(self.token_ids) - self.prompt_tokens


class SpeculationTotals(msgspec.Struct, frozen=True, array_like=True):
    """Counts what speculation did since an engine's start.

    ``sequence_steps`` are steps of sequences that wrote; ``judged[i]`` and ``accepted[i]`` are drafted tokens at
    place i of their draft that were judged, and those that stood. ``tokens`` and ``seconds`` are of steps that
    may draft, then of the share that may not (``speculation_control_share``).
    """

    sequence_steps: int = 0
    judged: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def gain(self) -> float:
        """Returns tokens per second where drafts are made over those where none are; 0 while one is unknown."""
        if not all(self.tokens) or not all(self.seconds):
            return 0.0
        return self.tokens[0] / self.seconds[0] / (self.tokens[1] / self.seconds[1])


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """Counts rows that went to experts since an engine took its role: by rank, and to the busiest of ``experts``
    experts.
    """

    rows: tuple[int, ...] = ()
    busiest: int = 0
    experts: int = 0

    @property
    def imbalance(self) -> float:
        """Returns the busiest expert's rows over the mean of all; 0 before there were any."""
        total = sum(self.rows)
        return self.busiest * self.experts / total if total else 0.0


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """Tells what one engine step held and how many seconds it took; cost curves are fitted on these.

    ``prefill_attention`` is the sum over prefill chunks of new x (context before + new / 2), in token pairs;
    ``decode_context`` the sum over decoding sequences of the tokens each one reads. ``draft_tokens`` are rows of
    decoding sequences beyond their first.
    """

    prefill_tokens: int
    prefill_attention: float
    decode_sequences: int
    decode_context: int
    seconds: float
    draft_tokens: int = 0


class StepCurve(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a step: fixed + the four terms of StepSample, each times its coefficient."""

    fixed: float
    prefill_token: float
    prefill_pair: float
    decode_sequence: float
    decode_context_token: float


class TransferCurve(msgspec.Struct, frozen=True, array_like=True):
    """Seconds to ship bytes: fixed + bytes x per_byte."""

    fixed: float
    per_byte: float


class KvLink(msgspec.Struct, frozen=True, array_like=True):
    """Tells how KV gets from a worker to ``peer``, by its preflight; ``fallback`` says why not by a better way."""

    peer: str
    transport: str
    bytes_per_s: float
    fixed_s: float
    fallback: str = ""


class SharedPages(msgspec.Struct, frozen=True, array_like=True):
    """Names an engine's pages on its card for a process of its user: which card, the driver's handle, bytes."""

    card: str
    handle: bytes
    size: int


class KvPair(msgspec.Struct, frozen=True, array_like=True):
    """Tells what a worker has shipped to ``peer`` since its start, and how fast lately."""

    peer: str
    transfers: int = 0
    failures: int = 0
    bytes: int = 0
    bytes_per_s: float = 0.0


class EngineWork(msgspec.Struct, frozen=True, array_like=True):
    """Tells what a step costs and what the machine can do: from these come MFU and MBU.

    Operations per computed token, per sampled one and per (query, key) pair; bytes that any step reads (weights)
    and bytes per token of context; the machine's ceilings per second, measured at start. Of a paced engine all are
    in seconds of its profile's ceiling, which is then 1.
    """

    token_flops: float
    sample_flops: float
    pair_flops: float
    step_bytes: float
    context_bytes: float
    peak_flops: float
    peak_bytes: float


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tells how busy a worker is: the changing half of its membership entry. It may be seconds old.

    Rates, ``busy`` (the share of time inside steps), MFU, MBU and watts are of the last seconds; counts are since
    the start. ``busy`` says nothing of the room that is left: one sequence keeps a decode worker in steps.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    leased_pages: int = 0
    steps: int = 0
    step_curve: StepCurve | None = None
    transfer_curve: TransferCurve | None = None
    kv_links: tuple[KvLink, ...] = ()
    fetch_curve: TransferCurve | None = None
    kv_pairs: tuple[KvPair, ...] = ()
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    busy: float = 0.0
    prefix_hits: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    mfu: float | None = None
    mbu: float | None = None
    watts: float | None = None
    speculation: SpeculationTotals | None = None
