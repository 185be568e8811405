"""Loads a model by an engine's settings and returns a runner that is ready to bind pages.

Knows nothing of workers or roles. Importing this module loads no torch: ``load_runner`` does, so that a process
which only carries the settings stays small.
"""

from __future__ import annotations

import os
from importlib import import_module

from baton.engine.config import (
    KV_NAMES,
    Activations,
    CudaStep,
    Device,
    Dtype,
    EngineConfig,
    KvCacheDtype,
    Quantization,
    WindowPages,
)
from baton.engine.plan import Runner
from baton.protos.errors import ConfigError

MOST_REPLICAS = 64  # copies of experts that a rank may have of each layer
# OpenMP reads this when torch is first imported. Its threads spin between ops by default; with more busy
# threads than cores a spinning one holds the core that another's work waits for (5x on the median step).
QUIET_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")


def load_runner(config: EngineConfig) -> Runner:
    """Loads the checkpoint and returns its runner, which has no pages yet. Raises CheckpointError (naming the file)
    or ConfigError (naming the setting).
    """
    _require_known(config)
    os.environ.setdefault(*QUIET_THREADS)
    return import_module("baton.engine.backends.loading").load(config)


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
    if config.window_pages not in WindowPages.__args__:  # type: ignore[attr-defined]
        text = f"window_pages {config.window_pages!r} is unknown; use auto, shared or own"
        raise ConfigError(text, "worker.window_pages")
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
    if not 0 <= config.expert_replicas <= MOST_REPLICAS:
        text = f"expert_replicas is {config.expert_replicas}; use 0 to {MOST_REPLICAS}"
        raise ConfigError(text, "expert_replicas")
    if config.expert_replicas and config.widths.count == 1:
        text = f"expert_replicas is {config.expert_replicas}, and one rank has all experts; set worker.ep, or 0"
        raise ConfigError(text, "expert_replicas")
    if config.max_model_len is not None and config.max_model_len < 1:
        raise ConfigError(f"max_model_len is {config.max_model_len}; use 1 or more", "max_model_len")
