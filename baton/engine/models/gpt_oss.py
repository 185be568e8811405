"""Describes gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, a window in every other layer, experts
with biases.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 131072
HEAD_DIM, KV_HEADS = 64, 8
WINDOW, FULL_EVERY = 128, 2
EPS, THETA = 1e-5, 150000.0
ALPHA, LIMIT = 1.702, 7.0
EXPERTS, CHOSEN = 128, 4
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def program(config: ModelConfig) -> Program:
    """Returns the program of a gpt-oss model, with experts in every layer; ``attention_bias`` adds biases to all
    four projections. Raises CheckpointError.
    """
    bias = config.flag("attention_bias", True)
    decoder = Decoder.read(config, HEAD_DIM, KV_HEADS, qkv_bias=bias, o_bias=bias, sinks=True)
    gate = config.number("swiglu_alpha", ALPHA), config.number("swiglu_limit", LIMIT)
    experts = ExpertLayers.read(
        config,
        (True,) * len(decoder.windows),
        config.size("num_local_experts", EXPERTS),
        decoder.inner,
        True,
        "mlp",
        ("gate", "up", "down"),
    )
    windows = config.alternating_windows(config.window(WINDOW), FULL_EVERY)
    eps = config.number("rms_norm_eps", EPS)
    found = replace(decoder, eps=eps, windows=windows, experts=replace(experts, stacked=gate))
    raw = config.fields.get("rope_parameters") or config.fields.get("rope_scaling") or YARN
    if not isinstance(raw, dict):
        raise config.error("rope_parameters", "must be an object")
    return found.program(config, MAX_POSITION, config.rope_of(raw, THETA))
