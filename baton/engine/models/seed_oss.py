"""Describes Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama's decoder with biases on q, k and v.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 524288
HEAD_DIM, KV_HEADS = 128, 8


def program(config: ModelConfig) -> Program:
    """Returns the program of a Seed-OSS model; ``attention_out_bias`` adds a bias to attention's output projection.
    Raises CheckpointError.
    """
    qkv, o = config.flag("attention_bias", True), config.flag("attention_out_bias", False)
    mlp = config.flag("mlp_bias", False)
    decoder = Decoder.read(config, HEAD_DIM, KV_HEADS, qkv_bias=qkv, o_bias=o, mlp_bias=mlp)
    return decoder.program(config, MAX_POSITION)
