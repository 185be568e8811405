"""Loads an encoder: refuses settings that encoders don't support, and packs weights for native products.

Knows nothing of steps.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.engine.backends.encoder.runner import EncoderRunner
from baton.engine.backends.work import work_of
from baton.engine.checkpoints.weights import Weights, load_weights
from baton.engine.config import EngineConfig
from baton.engine.plan import ModelSpec
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import FullAttention, Linear
from baton.engine.program.program import Program
from baton.kernels.abi import native
from baton.kernels.linear.packed import PackedWeight, pack_bf16
from baton.kernels.linear.packed_floats import pack_f32
from baton.kv.layout.page import layout_for
from baton.protos.errors import ConfigError

STORED = "uint8"  # the dtype of pages with token ids
DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


def load_encoder(config: EngineConfig, directory: Path, model: ModelConfig, planned: Program) -> EncoderRunner:
    """Returns the runner of an encoder. Raises CheckpointError, or ConfigError naming a setting that encoders don't
    support.
    """
    _require_possible(config, model)
    program, weights, fingerprint, _ = load_weights(config, directory, model, planned, DTYPES[config.dtype])
    spec = ModelSpec(
        fingerprint=fingerprint,
        layout=layout_for(STORED, program.groups, fidelity="tokens"),
        max_model_len=config.context(program.max_position, program.max_position),
        vocab_size=program.vocab_size,
        eos_token_ids=(),
    )
    work = work_of(program, weights, spec.layout, "cpu")
    attending = sum(isinstance(op, FullAttention) for op in program.ops)
    work = msgspec.structs.replace(work, pair_flops=work.pair_flops * attending)
    return EncoderRunner(spec, program, packed(program, weights), work)


def packed(program: Program, weights: Weights) -> Weights:
    """Returns ``weights`` with every matrix packed for the native product; unchanged if there is no native
    library.
    """
    if native.library() is None:
        return weights
    matrices = {op.weight for op in program.ops if isinstance(op, Linear)}
    return {name: _packed(weight) if name in matrices else weight for name, weight in weights.items()}


def _packed(weight: Tensor | PackedWeight) -> PackedWeight:
    if isinstance(weight, PackedWeight):
        return weight
    return pack_bf16(weight) if weight.dtype == torch.bfloat16 else pack_f32(weight)


def _require_possible(config: EngineConfig, model: ModelConfig) -> None:
    given = {
        "device": config.device if config.device != "cpu" else "",
        "kv_cache_dtype": config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "",
        "kv_selection": config.kv_selection if config.kv_selection != "all" else "",
        "adapters": "given" if config.adapters is not None else "",
    }
    for name, value in given.items():
        if value:
            text = f"{name} is {value}, and {model.model_type} is an encoder, which runs on the cpu and keeps no KV"
            raise ConfigError(f"{text}; leave it out", name)
