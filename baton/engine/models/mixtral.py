"""Describes Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts in every layer.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.mistral import KV_HEADS, MAX_POSITION
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program

PARTS = ("w1", "w3", "w2")
EPS, THETA = 1e-5, 1e6  # defaults of transformers' config class, because config.json may omit these fields


def program(config: ModelConfig) -> Program:
    """Returns the program of a Mixtral model, with experts in every layer, whose weights sum to 1. Raises
    CheckpointError.
    """
    decoder = Decoder.read(config.with_default("rms_norm_eps", EPS), kv_heads=KV_HEADS)
    count = len(decoder.windows)
    experts = ExpertLayers.read(
        config, (True,) * count, config.size("num_local_experts"), decoder.inner, True, "block_sparse_moe", PARTS
    )
    windows = (config.window(None),) * count
    return replace(decoder, windows=windows, experts=experts).program(config, MAX_POSITION, config.rope(THETA))
