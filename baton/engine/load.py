"""Loads a model by an engine's settings and returns a runner that is ready to bind pages.

Knows nothing of workers or roles. Importing this module loads no torch: ``load_runner`` does, so that a process
which only carries the settings stays small.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Literal

import msgspec

from baton.engine.plan import Runner
from baton.engine.program.shares import Widths
from baton.protos.errors import ConfigError
from baton.protos.nouns import AdapterLimits

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
KvCacheDtype = Literal["auto", "float32", "bf16", "fp16", "int8", "fp8"]
Quantization = Literal["none", "int8", "int4"]
Activations = Literal["auto", "bf16", "fp8"]
CudaStep = Literal["auto", "graph", "mega"]

# Names of K's and V's dtype in a page's layout, by the setting's name.
KV_NAMES = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8", "fp8": "fp8_e4m3"}

# OpenMP reads this when torch is first imported. Its threads spin between ops by default; with more busy
# threads than cores a spinning one holds the core that another's work waits for (5x on the median step).
QUIET_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")


class EngineConfig(msgspec.Struct, frozen=True):
    """Holds the settings of an engine: which model it runs, in what precision, and on which device.

    ``dtype`` "auto" is float32 on a CPU and bfloat16 on a GPU; float16 runs on a CPU only, and its sums are
    float32. ``kv_cache_dtype`` is the dtype of stored K and V, "auto" for ``dtype``; int8 and fp8 have a scale per
    (token, head). ``kv_selection`` says which part of a long context attention reads: "all", "sinks:N,window:N",
    "snapkv:N,window:N" or "h2o:N,window:N" in tokens (but for "all" on a CPU only). ``quantization`` rounds the
    weights on load, "none" takes them as stored; packed weights are cached under ``cache_dir``.
    ``quantization_overrides`` maps patterns of
    layer names to other schemes (``checkpoints/layer_schemes.py``), "none" to leave a layer as stored.

    ``is_draft`` marks a draft model, whose ``quantization`` and overrides are its target's: patterns may match no
    layer, and weights that are quantized already stay as they are. ``activations`` is the precision that rows are
    rounded to before they are multiplied by quantized weights (CPU only): "auto" is int8 for integer and code-book
    weights and bf16 for fp8 ones; "bf16" is for all (weight-only quantization); "fp8" is for fp8 weights, as their
    checkpoint specifies.

    ``cuda_step`` is how the GPU kernels run a step of up to 8 rows: "graph", one by one in a captured CUDA graph;
    "mega", a Llama's layers as one launch; "auto" is "graph". ``tp`` ranks share the model's columns, ``cp`` the
    rows of a step, ``ep`` its experts, ``pp`` its layers (``shares.Widths``); each rank is a process with its part
    of ``threads``.
    """

    model: str  # a directory in Hugging Face layout, or a hub id
    dtype: Dtype = "auto"
    device: Device = "cpu"
    max_model_len: int | None = None  # tokens; lowers the model's own context length
    threads: int | None = None  # torch's threads; None for its default
    kv_cache_dtype: KvCacheDtype = "auto"
    kv_selection: str = "all"
    quantization: Quantization = "none"
    cache_dir: str = ""  # empty: $BATON_CACHE_DIR, or the user's cache directory
    cuda_step: CudaStep = "auto"
    adapters: AdapterLimits | None = None  # limits of LoRA adapters that may be loaded; None: none may
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    rank_hosts: tuple[str, ...] = ()  # host:port of `baton ranks` on other hosts, among which ranks are dealt too
    rank_key_file: str = ""  # with the key that all hosts have; empty: loopback only
    rank_bound_s: float = 10.0  # seconds others wait for a rank before it counts as stuck; 0: for ever
    quantization_overrides: dict[str, str] = {}
    is_draft: bool = False
    activations: Activations = "auto"

    @property
    def widths(self) -> Widths:
        """Returns how many ranks share the model's columns, rows, layers and experts."""
        return Widths(self.tp, self.cp, self.pp, self.ep)

    @property
    def hosts(self) -> int:
        """Returns how many hosts have ranks, the lead's included."""
        return 1 + len(self.rank_hosts)


def load_runner(config: EngineConfig) -> Runner:
    """Loads the checkpoint and returns its runner, which has no pages yet. Raises CheckpointError (naming the file)
    or ConfigError (naming the setting).
    """
    _require_known(config)
    os.environ.setdefault(*QUIET_THREADS)
    return import_module("baton.engine.backends.torch.runner").load(config)


def _require_known(config: EngineConfig) -> None:
    if config.dtype not in Dtype.__args__:  # type: ignore[attr-defined]
        raise ConfigError(f"dtype {config.dtype!r} is unknown; use auto, float32, bfloat16 or float16", "dtype")
    if config.device not in Device.__args__:  # type: ignore[attr-defined]
        raise ConfigError(f"device {config.device!r} is unknown; use cpu, cuda, auto or paced:PROFILE", "device")
    if config.device != "cpu" and "float16" in (config.dtype, KV_NAMES.get(config.kv_cache_dtype)):
        field = "dtype" if config.dtype == "float16" else "kv_cache_dtype"
        text = f"float16 is computed on the cpu only, device is {config.device}; use bfloat16 (KV: bf16)"
        raise ConfigError(text, field)
    if config.kv_cache_dtype not in KvCacheDtype.__args__:  # type: ignore[attr-defined]
        text = f"KV cache dtype {config.kv_cache_dtype!r} is unknown; use auto, float32, bf16, fp16, int8 or fp8"
        raise ConfigError(text, "kv_cache_dtype")
    if config.quantization not in Quantization.__args__:  # type: ignore[attr-defined]
        text = f"quantization {config.quantization!r} is unknown; use none, int8 or int4"
        raise ConfigError(text, "quantization")
    if config.activations not in Activations.__args__:  # type: ignore[attr-defined]
        raise ConfigError(f"activations {config.activations!r} is unknown; use auto, bf16 or fp8", "activations")
    if config.cuda_step not in CudaStep.__args__:  # type: ignore[attr-defined]
        raise ConfigError(f"CUDA step {config.cuda_step!r} is unknown; use auto, graph or mega", "cuda_step")
    if config.threads is not None and config.threads < 1:
        raise ConfigError(f"threads is {config.threads}; use 1 or more", "threads")
    config.widths.require_known()
    if config.max_model_len is not None and config.max_model_len < 1:
        raise ConfigError(f"max_model_len is {config.max_model_len}; use 1 or more", "max_model_len")
