"""Describes ERNIE 4.5's dense models (https://ernie.baidu.com): Llama's decoder, with neighbours rotated in each
head.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 131072
HEAD_DIM, KV_HEADS = 128, 2
EPS, THETA = 1e-5, 500000.0


def program(config: ModelConfig) -> Program:
    """Returns the program of a dense ERNIE 4.5 model; ``use_bias`` adds biases to all projections. Raises
    CheckpointError.
    """
    bias = config.flag("use_bias", False)
    decoder = Decoder.read(config, HEAD_DIM, KV_HEADS, True, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    eps = config.number("rms_norm_eps", EPS)
    return replace(decoder, eps=eps, paired=decoder.head_dim).program(config, MAX_POSITION, config.rope(THETA))
