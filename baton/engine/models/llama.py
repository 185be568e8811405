"""Describes Llama 2 and 3 (https://arxiv.org/abs/2407.21783). Knows nothing of weights' values."""

from __future__ import annotations

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 2048


def program(config: ModelConfig) -> Program:
    """Returns the program of a Llama model; ``attention_bias`` and ``mlp_bias`` add biases to all of their
    projections. Raises CheckpointError.
    """
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))
    return decoder.program(config, MAX_POSITION)
