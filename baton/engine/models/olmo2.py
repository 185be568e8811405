"""Describes OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and MLPs, q and k normed over all
heads.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, Norms
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 2048
EPS = 1e-5


def program(config: ModelConfig) -> Program:
    """Returns the program of an OLMo 2 model; ``attention_bias`` adds biases to all four projections. Raises
    CheckpointError.
    """
    return olmo(config).program(config, MAX_POSITION)


def olmo(config: ModelConfig) -> Decoder:
    """Returns the decoder that OLMo 2 and 3 share. Raises CheckpointError."""
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(config, qkv_bias=bias, o_bias=bias, wide_qk_norm=True)
    eps = config.number("rms_norm_eps", EPS)
    return replace(decoder, norms=Norms.AFTER, eps=eps)
