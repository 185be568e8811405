"""Describes OLMoE (https://arxiv.org/abs/2409.02060): experts in every layer, q and k normed over all heads.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.qwen3_moe import PARTS
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 4096
EPS = 1e-5


def program(config: ModelConfig) -> Program:
    """Returns the program of an OLMoE model. Raises CheckpointError, also if ``clip_qkv`` is set."""
    config.must_be("clip_qkv")
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(config, qkv_bias=bias, o_bias=bias, wide_qk_norm=True)
    experts = ExpertLayers.read(
        config,
        (True,) * len(decoder.windows),
        config.size("num_experts", 64),
        decoder.inner,
        config.flag("norm_topk_prob", False),
        "mlp",
        PARTS,
    )
    return replace(decoder, eps=config.number("rms_norm_eps", EPS), experts=experts).program(config, MAX_POSITION)
