"""Describes Qwen3 (https://arxiv.org/abs/2505.09388): norms on q and k, a head size of 128.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.qwen2 import KV_HEADS, MAX_POSITION, windowed
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
HEAD_DIM = 128


def program(config: ModelConfig) -> Program:
    """Returns the program of a Qwen3 model; ``attention_bias`` adds biases to all four projections. Raises
    CheckpointError.
    """
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(config, HEAD_DIM, KV_HEADS, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return windowed(config, decoder).program(config, MAX_POSITION)
