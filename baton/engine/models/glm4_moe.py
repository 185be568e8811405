"""Describes GLM-4.5 and 4.6, also Air (https://arxiv.org/abs/2508.06471): half of each head is rotated, and experts
are chosen as in DeepSeek-V3.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.deepseek_v2 import experts_of
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import Routing
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 131072
KV_HEADS = 8
EPS = 1e-5
ROTARY = "partial_rotary_factor"


def program(config: ModelConfig) -> Program:
    """Returns the program of a GLM-4.5 model: experts after the first layers, with one shared by all tokens. Raises
    CheckpointError.
    """
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(
        config, None, KV_HEADS, qkv_bias=bias, qk_norm=config.flag("use_qk_norm", False), partial_rotary=True
    )
    groups, kept = config.size("n_group", 1), config.size("topk_group", 1)
    scale = config.number("routed_scaling_factor", 1.0)
    routing = Routing("sigmoid", groups, kept, best=2, scale=scale, biased=True)
    renormalise = config.flag("norm_topk_prob", True)
    experts = experts_of(config, routing, dense=1, experts=128, shared=1, inner=1408, renormalise=renormalise)
    rope = config.rope()
    half = replace(rope, parameters={ROTARY: 0.5} | rope.parameters)
    return replace(decoder, eps=config.number("rms_norm_eps", EPS), experts=experts).program(
        config, MAX_POSITION, half
    )
