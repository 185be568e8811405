"""Describes Qwen1.5-MoE and Qwen2-57B-A14B (https://arxiv.org/abs/2407.10671): Qwen2 with experts, one of them
shared.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.qwen2 import MAX_POSITION
from baton.engine.models.qwen3_moe import PARTS, sparse_layers
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
KV_HEADS = 16


def program(config: ModelConfig) -> Program:
    """Returns the program of a Qwen2 model with experts, and a gated expert shared by all tokens. Raises
    CheckpointError.
    """
    config.must_be("use_sliding_window", False)
    decoder = Decoder.read(config, kv_heads=KV_HEADS, qkv_bias=config.flag("qkv_bias", True))
    experts = ExpertLayers.read(
        config,
        sparse_layers(config, len(decoder.windows)),
        config.size("num_experts", 60),
        config.size("moe_intermediate_size", 1408),
        config.flag("norm_topk_prob", False),
        "mlp",
        PARTS,
        shared=config.size("shared_expert_intermediate_size", 5632),
        shared_at="shared_expert",
        shared_gate=True,
    )
    return replace(decoder, experts=experts).program(config, MAX_POSITION)
