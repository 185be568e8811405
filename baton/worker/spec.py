"""A worker's settings, grouped by the part that they are for, as both of its processes read them.

Knows nothing of how the settings came about (cluster/config.py) or of who starts the worker. As text a spec is one
flat JSON object, so that builds that group the settings otherwise can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from baton.cluster.model_id import model_id, paced_profile
from baton.engine.program.shares import Widths
from baton.protos.errors import ConfigError
from baton.protos.nouns import AdapterLimits
from baton.tls.identity import TlsFiles


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the groups. Zero or empty means: the model's own, the profile's own, or off."""


class EngineSpec(_Group, frozen=True):
    """Says which weights the engine runs, with which numerics, and on what device."""

    model: str = ""  # directory or hub id; unused by paced devices
    model_name: str = ""  # what clients call it; empty takes the model's (or profile's) last part
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_selection: str = (
        "all"  # what of a long context attention sees: all, sinks:N,window:N, snapkv:N or h2o:N,window:N
    )
    window_pages: str = "auto"  # of layers with a window beside others without: shared, own (given back), auto
    quantization: str = "none"  # of plain weights, on load
    quantization_overrides: dict[str, str] = {}  # schemes of layers, by pattern
    activations: str = "auto"  # what rows are rounded to beside quantized weights: auto, bf16, fp8
    cache_dir: str = ""  # of built kernels and packed weights
    device: str = "cpu"  # cpu, cuda, paced:PROFILE
    cuda_step: str = "auto"  # of the GPU's own kernels: auto, graph, mega
    seed: int = 0  # of the run, for what may be seeded; lease ids never are
    threads: int = 0
    max_model_len: int = 0
    tp: int = 1  # processes that share the model, each with its part of every matrix
    cp: int = 1  # processes that share the rows of each step
    pp: int = 1  # processes, or stages of ``tp`` of them, that share the model's layers
    ep: int = 1  # processes that share the model's experts
    expert_replicas: int = 0  # places per rank and layer for copies of busy experts
    rank_hosts: tuple[str, ...] = ()  # host:port of `baton ranks`, which have some of these processes
    rank_key_file: str = ""  # with the key that they ask for
    rank_wait_s: float = 0.0  # seconds to wait for them at start
    cores_page: str = ""  # memory by which the machine's engines lend one another cores; empty: none are lent
    all_cores: int = 0  # that are lent, of which ``threads`` are its own

    @property
    def widths(self) -> Widths:
        """Returns how many ranks share the model's columns, rows, layers and experts."""
        return Widths(self.tp, self.cp, self.pp, self.ep)

    @property
    def paced_profile(self) -> str:
        """Returns the PROFILE of a device named ``paced:PROFILE``, else ""."""
        return paced_profile(self.device)

    @property
    def model_id(self) -> str:
        """Returns the name that clients use for the model."""
        return model_id(self.model_name, self.model, self.device)


class AdapterSpec(_Group, frozen=True):
    """Says which LoRA adapters are loaded at start, and what may be loaded beside them."""

    adapters: dict[str, str] = {}  # directories by name
    adapter_root: str = ""  # beneath which adapters may be loaded while it runs; empty: none may
    max_adapters: int = 16
    max_adapter_bytes: int = 1 << 30  # of the matrices of all that are held
    max_adapter_rank: int = 64

    @property
    def limits(self) -> AdapterLimits:
        """Returns the limits on adapters that the worker may hold."""
        return AdapterLimits(self.max_adapters, self.max_adapter_bytes, self.max_adapter_rank, self.adapter_root)

    @property
    def wanted(self) -> bool:
        """Returns whether this worker may ever apply an adapter."""
        return bool(self.adapters or (self.adapter_root and self.max_adapters))


class CacheSpec(_Group, frozen=True):
    """Says how many KV pages there are, of which size, and which lower tiers lie below them."""

    pages: int = 0
    block_tokens: int = 16  # tokens in a page: a multiple of 16
    kv_memory_bytes: int = 0  # what the pages may take where ``pages`` is 0; 0: as much as there is room for
    kv_memory_share: float = 0.85  # of a GPU's memory, that its workers take together
    kv_host_share: float = 0.8  # of the host's available memory, that copies of GPUs' pages take together
    kv_mirror: Literal["whole", "demand"] = "whole"  # whether the host has a copy of each page of a GPU
    kv_sharers: int = 1  # workers on this machine that divide its memory among mirrors of GPUs' pages
    card_sharers: int = 1  # workers that divide a card of this one's
    eviction: Literal["worth", "lru"] = "worth"  # which cached pages go first
    kv_codec: str = "none"  # how blocks are coded on their way here: none, int8, fp8, int4
    host_tier_bytes: int = 0  # of host memory, for blocks that the device evicted
    disk_tier_bytes: int = 0
    disk_tier_dir: str = ""  # where each slot keeps its disk tier
    pinned_share: float = 0.25  # of the pages, that pinned prefixes may take
    shared_tier: str = ""  # a folder or s3://BUCKET/PREFIX that workers share
    shared_tier_endpoint: str = ""  # of a bucket's store; empty: Amazon's
    shared_tier_bytes: int = 0  # of the store at most; 0: no bound

    @property
    def has_tiers(self) -> bool:
        """Returns whether there is any tier below the device's pages."""
        return bool(self.host_tier_bytes or self.disk_tier_bytes or self.shared_tier)


class StepSpec(_Group, frozen=True):
    """Says how much an engine's step computes, and the engine's time limits."""

    max_batch: int = 64  # sequences in a step
    prefill_chunk_tokens: int = 512
    async_steps: Literal["auto", "off"] = "auto"  # whether a GPU's decode steps are planned while others run
    speculation: str = "none"  # names of engine/speculate joined by +, or auto
    speculation_accept: Literal["exact", "distribution"] = "exact"  # which drafts of sampled answers stand
    speculation_control_share: float = 0.01  # of the steps that draft nothing
    itl_target_s: float = 0.0  # wanted time between two tokens of an answer; 0: steps are not kept short
    pace_beside_prompts_s: float = 0.0  # between two decode steps while prompts are read on the same cores; 0: none
    lease_ttl_s: float = 30.0  # how long a lease lasts whose handoff makes no progress
    state_every_blocks: int = 0  # between two checkpoints of recurrent state; 0: as many as a state takes pages
    stall_s: float = 10.0  # silence of the engine after which it is not serving; 0: it is not watched


class ServerSpec(_Group, frozen=True):
    """Says where the worker listens, and how long it drains when it is told to stop. A port of 0 is a free one."""

    host: str = "127.0.0.1"
    port: int = 0
    data_port: int = 0  # of the tcp transport, in a decode worker
    metrics_port: int = 0
    metrics: bool = True  # whether there is a port for metrics
    kv_transport: str = "auto"  # or a file's name in kv/transport
    tls: TlsFiles | None = None  # the worker's certificate and whom it trusts; None: plaintext
    drain_grace_s: float = 2.0  # in which requests may finish as the worker leaves


class MemberSpec(_Group, frozen=True):
    """Says how the worker publishes itself to routers."""

    redis_url: str = ""  # empty: no membership
    namespace: str = "baton"
    beat_s: float = 0.5  # between two writes of its entry
    lease_s: float = 5.0  # after which an entry that isn't written again is gone


class ObserveSpec(_Group, frozen=True):
    """Says what is counted, traced and logged."""

    telemetry: bool = True  # whether anything is counted for /metrics
    vllm_names: bool = False  # show metrics under vLLM's names too
    otlp_endpoint: str = ""
    log_level: str = "info"
    loop_stall_s: float = 0.25  # of its I/O process's event loop, above which it is told; 0: nobody looks


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds a worker's slot, its role, and the settings of each of its parts."""

    slot: str  # worker id, stable over restarts
    role: Literal["prefill", "decode"]
    slot_dir: str  # where <slot>.lock and <slot>.json lie
    owner_pid: int = 0  # the worker ends when this process does; 0: it lives on
    engine: EngineSpec = EngineSpec()
    lora: AdapterSpec = AdapterSpec()
    cache: CacheSpec = CacheSpec()
    steps: StepSpec = StepSpec()
    server: ServerSpec = ServerSpec()
    member: MemberSpec = MemberSpec()
    observe: ObserveSpec = ObserveSpec()

    @classmethod
    def of(cls, slot: str, role: str, slot_dir: str | Path, **settings: object) -> WorkerSpec:
        """Returns a spec with ``settings`` given by field name, whichever group they are in.

        Raises msgspec.ValidationError for an unknown name or a value of another type.
        """
        fields = {"slot": slot, "role": role, "slot_dir": str(slot_dir), **settings}
        return msgspec.convert(_grouped(fields), cls)


GROUPS: dict[str, type[_Group]] = {
    "engine": EngineSpec,
    "lora": AdapterSpec,
    "cache": CacheSpec,
    "steps": StepSpec,
    "server": ServerSpec,
    "member": MemberSpec,
    "observe": ObserveSpec,
}
_GROUP_OF = {field: name for name, group in GROUPS.items() for field in group.__struct_fields__}


def load_spec(text: str) -> WorkerSpec:
    """Returns the spec from JSON text, or from the file whose path ``text`` is.

    Raises ConfigError naming the field.
    """
    try:
        raw = text if text.lstrip().startswith("{") else Path(text).read_text()
        return msgspec.convert(_grouped(msgspec.json.decode(raw, type=dict[str, object])), WorkerSpec)
    except OSError as error:
        raise ConfigError(f"--spec {text}: {error.strerror}", "spec") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--spec: {error}", "spec") from None


def dump_spec(spec: WorkerSpec) -> str:
    """Returns the spec as JSON for ``load_spec``.

    Fields with their default are left out, so that an older build can read the text unless it uses a new setting.
    """
    fields: dict[str, object] = msgspec.to_builtins(spec)
    for name in GROUPS:
        fields |= msgspec.to_builtins(getattr(spec, name))
        fields.pop(name, None)
    return msgspec.json.encode(fields).decode()


def _grouped(fields: Mapping[str, object]) -> dict[str, object]:
    """Returns flat ``fields`` with each group's in an object of their own; unknown ones stay where they are."""
    groups: dict[str, dict[str, object]] = {}
    top: dict[str, object] = {}
    for name, value in fields.items():
        (groups.setdefault(_GROUP_OF[name], {}) if name in _GROUP_OF else top)[name] = value
    return top | groups
