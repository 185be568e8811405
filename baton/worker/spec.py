"""What a worker is told: one struct, JSON on the way in, read by both of its processes.

Knows nothing of how the settings came about (cluster/config.py) or of who starts the worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from baton.cluster.model_id import model_id, paced_profile
from baton.protos.errors import ConfigError
from baton.tls.identity import TlsFiles


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker. Zero or empty means: the model's own, the profile's own, or off.

    What has its default is not written: an older build reads the text, unless it asks for what is new.
    """

    slot: str  # worker id, stable over restarts
    role: Literal["prefill", "decode"]
    slot_dir: str  # where <slot>.lock and <slot>.json lie
    model: str = ""  # directory or hub id; unused by paced devices
    model_name: str = ""  # what clients call it; empty takes the model's (or profile's) last part
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "none"  # of plain weights, on load
    cache_dir: str = ""  # of built kernels and packed weights
    device: str = "cpu"  # cpu, cuda, paced:PROFILE
    cuda_step: str = "auto"  # of the GPU's own kernels: auto, graph, mega
    seed: int = 0  # of the run, for what may be seeded; lease ids never are
    threads: int = 0
    pages: int = 0
    block_tokens: int = 16  # tokens in a page: a multiple of 16
    kv_memory_bytes: int = 512 << 20
    max_model_len: int = 0
    max_batch: int = 64
    prefill_chunk_tokens: int = 512
    itl_target_s: float = 0.0  # wanted time between two tokens of an answer; 0: steps are not kept short
    speculation: str = "none"  # names of engine/speculate joined by +, or auto
    stall_s: float = 10.0  # silence of the engine after which it is not serving; 0: it is not watched
    lease_ttl_s: float = 30.0
    drain_grace_s: float = 2.0
    host: str = "127.0.0.1"
    port: int = 0
    data_port: int = 0  # of the tcp transport, in a decode worker
    metrics_port: int = 0
    redis_url: str = ""  # empty: no membership
    namespace: str = "baton"
    beat_s: float = 0.5
    lease_s: float = 5.0
    metrics: bool = True
    telemetry: bool = True  # whether anything is counted for /metrics
    vllm_names: bool = False  # show metrics under vLLM's names too
    host_tier_bytes: int = 0  # of host memory, for blocks that the device evicted
    disk_tier_bytes: int = 0
    disk_tier_dir: str = ""  # where each slot keeps its disk tier
    kv_transport: str = "auto"  # or a file's name in kv/transport
    kv_codec: str = "none"  # how blocks are coded on their way here: none, int8, fp8
    tls: TlsFiles | None = None  # the worker's certificate and whom it trusts; None: plaintext
    otlp_endpoint: str = ""
    log_level: str = "info"
    loop_stall_s: float = 0.25  # of its I/O process; 0: nobody looks
    owner_pid: int = 0  # the worker ends when this process does; 0: it lives on

    @property
    def paced_profile(self) -> str:
        """The PROFILE of a device named ``paced:PROFILE``, or an empty string."""
        return paced_profile(self.device)

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below the device's pages."""
        return bool(self.host_tier_bytes or self.disk_tier_bytes)

    @property
    def model_id(self) -> str:
        """The name that clients use."""
        return model_id(self.model_name, self.model, self.device)


def load_spec(text: str) -> WorkerSpec:
    """From JSON, or from a file that holds it. Raises ConfigError naming the field."""
    try:
        raw = text if text.lstrip().startswith("{") else Path(text).read_text()
        return msgspec.json.decode(raw, type=WorkerSpec)
    except OSError as error:
        raise ConfigError(f"--spec {text}: {error.strerror}", "spec") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--spec: {error}", "spec") from None


def dump_spec(spec: WorkerSpec) -> str:
    """The JSON that ``load_spec`` reads."""
    return msgspec.json.encode(spec).decode()
