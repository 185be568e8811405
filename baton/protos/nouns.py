"""The types shared by all processes, as frozen structs: what is passed around instead of protobuf.

Knows nothing of gRPC, torch or any process. ``convert.py`` turns each into its protobuf message and back.
"""

from __future__ import annotations

import msgspec

from baton.protos.errors import ErrorInfo
from baton.protos.version import PROTOCOL as PROTOCOL
from baton.protos.version import product_version

BLOCK_TOKENS = 16  # tokens of a run of KV as kernels read it; pages hold whole runs
RECORDED_ADAPTERS = 1 << 20  # adapters' numbers from here on mean the same in all trace files that routers write
EVERY_BLOCK = 1 << 31  # a number of blocks that no sequence has
MAX_LOGPROBS = 20  # alternatives per token, as many as OpenAI's API gives
POOLINGS = (
    "mean",
    "last",
    "cls",
    "score",
)  # the last two are an encoder's: the first token's state, a pair's score
# A JSON schema; a regular expression; a JSON array of strings; an EBNF grammar (GBNF or Lark).
GRAMMAR_KINDS = ("json_schema", "regex", "choice", "grammar")
MAX_GRAMMAR_BYTES = 64 << 10  # of a client's grammar, because it has to fit into one message to its process
# Between JSON tokens: a space or a line break with its indent, as every style writes it, but no run of empty lines:
# a small model that has begun one would fill max_tokens with it.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x09]{1,2}|\x0D?\x0A[\x20\x09]{0,32}"}
TENANT_SALT_BYTES = 16  # of a key's tenant, at the start of ``tenant_salt``; a client's own follows


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Describes what an answer must match: text of at most MAX_GRAMMAR_BYTES, of one of GRAMMAR_KINDS."""

    kind: str
    spec: str


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes how the next token is chosen, with every default filled in; the router has checked the ranges.

    ``max_drafts``: drafted tokens that one step may verify, 0 for no speculation, None for as many as pay.
    ``logprob_token_ids``: with ``logprobs``, the tokens whose logprobs are returned in place of the likeliest
    alternatives.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None  # alternatives per output token; None: no logprobs
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: no logprobs
    pooling: str = ""  # of the prompt's hidden states, one of POOLINGS; "": none
    max_drafts: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def penalised(self) -> bool:
        """Returns whether earlier tokens change the logits, by any of the penalties."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Holds the natural-log probability of one token under the raw logits; rank 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Holds the emitted token's logprob and those of the alternatives, the likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class TokenRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds consecutive output tokens of one choice; ``output_index`` is the index of the first, counted from the
    answer's beginning.

    ``accepted_drafts`` of the tokens were drafted; ``rejected_drafts`` more were drafted and rejected.
    ``finish_reason`` is "" unless the run is the last.
    """

    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""
    stop_token_id: int | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class Station(msgspec.Struct, frozen=True, array_like=True):
    """Holds the seconds that a request spent at one station of its way (queue, prefill, …), by the reporting
    process's clock.
    """

    name: str
    seconds: float


class LayerGroup(msgspec.Struct, frozen=True):
    """Describes layers whose KV planes share a block table.

    ``window`` is the attention window in tokens, 0 for unbounded.
    """

    kind: str
    planes: tuple[str, ...]
    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Describes ``count`` ranges of ``bytes`` each, ``stride`` bytes apart, from byte ``at`` of a page on."""

    at: int
    bytes: int
    stride: int  # 0 for a single range
    count: int


class KvReceiver(msgspec.Struct, frozen=True, array_like=True):
    """Describes a host of a worker's ranks that receives KV: the gRPC address at which it takes handoffs, and the
    part of each page that goes there.
    """

    address: str
    part: tuple[Extent, ...]


class StatePlane(msgspec.Struct, frozen=True):
    """Describes one kind of recurrent state of a sequence: float32 of ``shape`` in each of ``layers`` layers."""

    name: str
    layers: int
    shape: tuple[int, ...]


class KvLayout(msgspec.Struct, frozen=True):
    """Describes how one shard's pages hold KV; ``page_bytes`` is a page's size (``block_tokens`` tokens, all
    layers).

    A page of more than 16 tokens is runs of 16 in a row, each laid out as a page of 16 (kv/layout/page.py).
    ``fidelity`` names how exact the stored values are. ``states`` are the planes of a sequence's recurrent state,
    which lies in pages of its own (kv/layout/state.py). With ``windows`` a block has several pages, each with
    as many layers as ``groups`` say: one for each entry, which is these layers' window in tokens, 0 for none
    (kv/layout/tables.py).
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
    windows: tuple[int, ...] = ()

    @property
    def runs(self) -> int:
        """Returns the number of runs of 16 tokens in a page."""
        return self.block_tokens // BLOCK_TOKENS

    @property
    def run_bytes(self) -> int:
        """Returns the bytes of a run of 16 tokens, all layers."""
        return self.page_bytes * BLOCK_TOKENS // max(1, self.block_tokens)


class WorkerInfo(msgspec.Struct, frozen=True):
    """Describes a worker: the part of its membership entry that seldom changes.

    ``incarnation`` is new with each start or change of role (``process_of``). ``fingerprint`` is hex SHA-256 of its
    weights. ``data_addresses`` gives the addresses of its KV receivers by transport, besides ``address`` (gRPC).
    Workers with one ``host_id`` run under one kernel. ``kv_backing`` is the kind of memory of its host pages
    (kv/memory/host_pages.py). A worker of several ranks has their ``widths`` by setting (tp, cp, pp, ep; those
    above 1), and in ``rank_hosts`` where each rank runs: "" on the worker's own host, else at this `baton ranks`.
    """

    worker_id: str
    incarnation: str
    role: str  # "prefill" or "decode"
    address: str
    model_id: str
    fingerprint: str
    layout: KvLayout
    max_model_len: int  # tokens of context
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pages: int  # KV pages in its pool
    state: str = "ready"
    max_batch: int = 64  # sequences in one step
    device: str = "cpu"
    protocol: str = PROTOCOL
    adapters: tuple[str, ...] = ()  # ids of the LoRA adapters that requests may use
    metrics_address: str = ""
    host_id: str = ""
    data_addresses: dict[str, str] = {}
    kv_backing: str = ""
    version: str = ""  # of the build; empty where an older one doesn't say
    widths: dict[str, int] = {}
    rank_hosts: tuple[str, ...] = ()
    takes_extents: bool = False  # whether pages may come in parts from several hosts
    bridges_windows: bool = False  # whether its handoffs convert between pages by window and pages of all layers
    # Hosts of its ranks that each take what they read of every page; () if its address takes all. Describe alone
    # tells of them.
    receivers: tuple[KvReceiver, ...] = ()
    role_error: ErrorInfo | None = None  # why this life has its former role again: the one asked for can't begin


def process_of(incarnation: str) -> str:
    """Returns the part of an incarnation that names the process, which stays the same when its role changes."""
    return incarnation.partition(".")[0]


def of_this_build(info: WorkerInfo) -> WorkerInfo:
    """Returns ``info`` with this build's version filled in."""
    return msgspec.structs.replace(info, version=product_version())


class AdapterInfo(msgspec.Struct, frozen=True):
    """Describes a LoRA adapter that a worker holds; ``id`` is NAME@DIGEST (protos/adapter_id.py).

    ``rank`` is the largest of its matrices, ``bytes`` their memory, ``targets`` the last parts of the names of the
    modules that it changes. ``running`` counts the sequences on it; one that is ``leaving`` takes no new ones.
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
    """Limits the adapters of a worker: their number, their matrices' bytes in all, and the rank of each.

    ``root`` is the directory beneath which adapters may be loaded while it runs; "": none may be.
    """

    max_loaded: int
    max_bytes: int
    max_rank: int
    root: str = ""


class PoolSnapshot(msgspec.Struct, frozen=True):
    """Counts the pages of a worker's KV pool, and its leases and steps.

    At baseline nothing is leased and nothing quarantined. ``quarantined`` pages wait until no transfer touches them
    any more.

    ``computing``: nothing was counted, because the engine gets on with a long step.
    """

    pages: int = 0
    free: int = 0
    cached: int = 0
    leased: int = 0
    quarantined: int = 0
    leases: int = 0
    leases_swept: int = 0
    running: int = 0
    waiting: int = 0
    incarnation: str = ""
    step_seconds_p50: float = 0.0
    steps: int = 0
    computing: bool = False

    @property
    def at_baseline(self) -> bool:
        """Returns whether no page is leased or quarantined and there is no lease."""
        return not self.computing and self.leased == 0 and self.quarantined == 0 and self.leases == 0


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds the part of a request that an engine needs; ``token_ids`` is the prompt, then outputs emitted before.

    ``prediction`` is the answer that the client expects, as a source of drafts. ``retained``: the client means to
    use the prefix again, which counts when blocks are evicted and changes no token. It is about the first
    ``retained_tokens`` tokens, or with 0 about all, those of the answer too.
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
    retained_tokens: int = 0

    def hinted_blocks(self, block_tokens: int) -> int:
        """Returns how many leading blocks of ``block_tokens`` tokens the client means to use again; EVERY_BLOCK for
        all.
        """
        if not self.retained:
            return 0
        return self.retained_tokens // block_tokens if self.retained_tokens else EVERY_BLOCK

    @property
    def replayed(self) -> int:
        """Returns the number of outputs emitted before; the next output has this index."""
        return len(self.token_ids) - self.prompt_tokens
