"""Describes GLM-4 (https://arxiv.org/abs/2406.12793): half of each head rotated by neighbours, norms around
attention and MLPs.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, Norms
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 131072
HEAD_DIM, KV_HEADS = 128, 2
EPS = 1.5625e-07
ROTARY = "partial_rotary_factor"


def program(config: ModelConfig) -> Program:
    """Returns the program of a GLM-4 model, with norms before and after attention and MLPs. Raises
    CheckpointError.
    """
    return glm(config, Norms.GLM)


def glm(config: ModelConfig, norms: Norms) -> Program:
    """Returns the program of a GLM-4 model or its predecessor, which differ in ``norms``; ``attention_bias`` adds
    biases to q, k and v. Raises CheckpointError.
    """
    decoder = Decoder.read(
        config,
        HEAD_DIM,
        KV_HEADS,
        qkv_bias=config.flag("attention_bias", True),
        fused_mlp=True,
        partial_rotary=True,
    )
    rope = config.rope()
    half = replace(rope, parameters={ROTARY: 0.5} | rope.parameters)
    found = replace(
        decoder,
        norms=norms,
        eps=config.number("rms_norm_eps", EPS),
        paired=int(decoder.head_dim * half.parameters[ROTARY]),
    )
    return found.program(config, MAX_POSITION, half)
