"""Describes Gemma (https://arxiv.org/abs/2403.08295): norm weights stored less 1, scaled embeddings, GELU.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import GELU_TANH, Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 8192
HEAD_DIM, KV_HEADS = 256, 16


def program(config: ModelConfig) -> Program:
    """Returns the program of a Gemma model; ``hidden_act`` "gelu" means the tanh approximation, as in the first
    checkpoints. Raises CheckpointError.
    """
    config.must_be("use_bidirectional_attention", False)
    config.must_be("hidden_act", "gelu", GELU_TANH)
    bias, activation = config.flag("attention_bias", False), ("hidden_activation", GELU_TANH)
    decoder = Decoder.read(config, HEAD_DIM, KV_HEADS, True, activation, qkv_bias=bias, o_bias=bias)
    return replace(decoder, norm_plus=1.0, embed_scale=decoder.hidden**0.5).program(config, MAX_POSITION)
