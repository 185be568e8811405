"""``[worker]``: settings of each worker.

Knows nothing of how many there are.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.cluster.sections.base import Section


class WorkerConfig(Section):
    """Configures each worker of the cluster. ``threads`` 0 shares the machine's cores among its workers."""

    model: str = Field(
        default="",
        description="directory, .gguf file or Hugging Face id (ORG/REPO:Q4_K_M); empty takes the demo model",
    )
    model_name: str = Field(default="", description="the name clients use; empty takes the model's last path part")
    adapters: dict[str, str] = Field(
        default={}, description="LoRA adapters by name, each a directory in PEFT's layout; loaded at start"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of computation; auto takes the checkpoint's, float32 on a CPU"
    )
    kv_cache_dtype: Literal["auto", "float32", "bf16", "fp16", "int8", "fp8"] = Field(
        default="auto", description="of stored K and V; auto: as dtype"
    )
    kv_selection: str = Field(
        default="all",
        pattern=r"^(all|sinks:\d{1,9},window:\d{1,9}|(snapkv|h2o):\d{1,9}(,window:\d{1,9})?)$",
        description="what of a long context attention sees: all, sinks:64,window:4096, snapkv:1024,window:64 or "
        "h2o:1024,window:64 (tokens); lossy",
    )
    window_pages: Literal["auto", "shared", "own"] = Field(
        default="auto",
        description="own: layers that see a window, beside others that see all, have pages that are given back "
        "behind it (cpu only). auto: own where it is possible, else shared. Workers of both kinds share no cached "
        "blocks",
    )
    quantization: Literal["none", "int8", "int4"] = Field(default="none", description="of plain weights, on load")
    quantization_overrides: dict[str, str] = Field(
        default={}, description='other schemes for layers, by pattern: {"*.down_proj" = "int8", lm_head = "none"}'
    )
    activations: Literal["auto", "bf16", "fp8"] = Field(
        default="auto",
        description="beside quantized weights: bf16 (weight-only), fp8 (as an fp8 checkpoint has it); "
        "auto: int8, beside fp8 weights bf16",
    )
    cache_dir: str = Field(default="", description="of packed weights; empty: $BATON_CACHE_DIR or ~/.cache/baton")
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda|auto|paced:.+)$",
        description="cpu, cuda, auto (a GPU where one will do, else the CPU) or paced:PROFILE",
    )
    cuda_step: Literal["auto", "graph", "mega"] = Field(
        default="auto",
        description="of a GPU, up to 8 rows: a graph of kernels or one megakernel; auto: the faster one",
    )
    seed: int = Field(default=0, description="of what is random; 0 takes the system's entropy")
    host: str = Field(default="127.0.0.1", description="address its gRPC server binds and advertises")
    port: int = Field(default=0, ge=0, le=65535, description="of its gRPC server; 0 takes a free one")
    data_port: int = Field(
        default=0, ge=0, le=65535, description="on which a decode worker takes KV by tcp; 0 takes a free one"
    )
    metrics_port: int = Field(default=0, ge=0, le=65535, description="of its /metrics; 0 takes a free one")
    threads: int = Field(default=0, ge=0, description="of one worker; 0 shares the machine's cores")
    tp: int = Field(default=1, ge=1, le=64, description="ranks: processes that share a worker's model and threads")
    cp: int = Field(default=1, ge=1, le=64, description="ranks that share the rows of each step, in place of tp")
    pp: int = Field(
        default=1, ge=1, le=64, description="ranks, or stages of tp ranks, that share the model's layers"
    )
    ep: int = Field(
        default=1, ge=1, le=64, description="ranks that share the model's experts, and rows of each step"
    )
    expert_replicas: int = Field(
        default=0,
        ge=0,
        le=64,
        description="copies of busy experts of other ranks that each rank has room for, per layer; workers "
        "with all experts on one rank have none",
    )
    rank_hosts: list[str] = Field(
        default=[],
        description="host:port of `baton ranks` on other hosts: a worker's ranks are dealt among its own host and "
        "these, in order and in equal numbers",
    )
    rank_key_file: str = Field(
        default="",
        description="file with the key that hosts of ranks share; empty: loopback addresses only, unless there is "
        "[tls]",
    )
    rank_wait_s: float = Field(
        default=0, ge=0, le=86400, description="seconds to wait at start for rank_hosts that don't answer yet"
    )
    pages: int = Field(
        default=0,
        ge=0,
        description="KV pages; 0 takes kv_memory_bytes; with window_pages auto blocks, of several pages",
    )
    kv_memory_bytes: int = Field(
        default=0,
        ge=0,
        description="of KV pages, per worker; 0: 512 MiB, on a GPU what kv_memory_share leaves beside the weights",
    )
    kv_memory_share: float = Field(
        default=0.85, gt=0, le=1, description="of a GPU's memory, that the workers on it take together"
    )
    kv_host_share: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="of the host's available memory, that copies of GPUs' KV pages take together",
    )
    kv_mirror: Literal["whole", "demand"] = Field(
        default="whole",
        description="whole: all of a GPU's KV pages have a copy on the host, which bounds them; demand: those that "
        "are read there",
    )
    max_model_len: int = Field(default=0, ge=0, description="0 takes the model's own")
    max_batch: int = Field(default=64, ge=1, description="sequences in one step")
    prefill_chunk_tokens: int = Field(default=512, ge=16, description="prompt tokens of one step")
    state_every_blocks: int = Field(
        default=0,
        ge=0,
        description="blocks between two checkpoints of recurrent state; 0: as many as a state takes pages",
    )
    itl_target_s: float = Field(
        default=0.0, ge=0, description="seconds wanted between an answer's tokens; decode steps keep to it; 0: off"
    )
    pace_beside_prompts_s: float = Field(
        default=0.15,
        ge=0,
        le=1,
        description="seconds between two decode steps while a prefill worker of the same machine, with which cores "
        "are lent, reads prompts. At most 0.4 of a chunk's time there. Answers advance together, which costs "
        "the prompts less. 0: as fast as it goes",
    )
    async_steps: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: a GPU's decode step is planned while the one before it runs, where nothing is drafted",
    )
    speculation: str = Field(
        default="auto",
        description="drafts of tokens: none, auto (where drafts can be taken), prompt_lookup, suffix, forced, "
        "lookahead, self, self:LAYERS, draft:MODEL, medusa:PATH, eagle3:PATH, or several joined by +",
    )
    speculation_accept: Literal["exact", "distribution"] = Field(
        default="exact",
        description="which drafts of sampled answers stand. exact: those that make the very tokens of no "
        "speculation. distribution: by rejection sampling, which keeps the tokens' distribution alone",
    )
    speculation_control_share: float = Field(
        default=0.01, ge=0, le=0.5, description="of the steps that draft nothing, to see what drafts bring; 0: none"
    )
    stall_s: float = Field(
        default=10.0,
        ge=0,
        description="an engine that is silent so long is not serving, twice so long: it is replaced; 0: never",
    )
    lease_ttl_s: float = Field(default=30.0, gt=0, description="a reservation that nobody renews ends then")
    drain_grace_s: float = Field(
        default=2.0, ge=0, description="what runs may finish in this time when the worker is told to stop"
    )
    metrics: bool = Field(default=True, description="whether it answers GET /metrics")
    eviction: Literal["worth", "lru"] = Field(
        default="worth",
        description="which cached pages go first, also in host and disk tiers: those worth least, as it learns, or "
        "unused longest",
    )
    host_tier_bytes: int = Field(default=0, ge=0, description="host memory below the device's pages; 0: off")
    disk_tier_bytes: int = Field(default=0, ge=0, description="each worker's files below that; 0: off")
    disk_tier_dir: str = Field(default="", description="where those files lie; they survive a restart")
    pinned_share: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="of a worker's pages, that pinned prefixes may take; 0: none is pinned",
    )
    shared_tier: str = Field(
        default="", description="a mounted folder or s3://BUCKET/PREFIX where workers of a model share blocks"
    )
    shared_tier_endpoint: str = Field(default="", description="URL of the bucket's store; empty: Amazon's")
    shared_tier_bytes: int = Field(default=0, ge=0, description="of the store, about, by all workers; 0: no bound")
    kv_transport: str = Field(
        default="auto",
        description="how KV gets to decode workers: shm, cuda_ipc, nccl, nixl, tcp or grpc; auto measures "
        "each pair and takes the best",
    )
    block_tokens: int = Field(
        default=16, ge=16, le=1024, multiple_of=16, description="tokens in a KV page; pools may differ in it"
    )
    kv_codec: Literal["none", "int8", "fp8", "int4"] = Field(
        default="none", description="code KV for slow networks; lossy, and kept apart from exact KV in every cache"
    )
