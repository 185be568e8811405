"""Describes Command R (https://docs.cohere.com/docs/command-r): attention parallel to MLPs, after one norm by mean
and variance.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, Norms
from baton.engine.program.parallel import ParallelDecoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 8192
EPS, LOGIT_SCALE, THETA = 1e-5, 0.0625, 500000.0


def program(config: ModelConfig) -> Program:
    """Returns the program of a Command R model. Raises CheckpointError, also if ``use_qk_norm`` is set."""
    config.must_be("use_qk_norm", False)
    return command(config).program(config, MAX_POSITION, config.rope(THETA))


def command(config: ModelConfig) -> Decoder:
    """Returns the decoder that Command R and R7B share: parallel attention and MLP, rotated neighbours, scaled
    logits. Raises CheckpointError.
    """
    bias = config.flag("attention_bias", False)
    decoder = ParallelDecoder.of(Decoder.read(config, tied=True, qkv_bias=bias, o_bias=bias))
    return replace(
        decoder,
        norms=Norms.ONE,
        eps=config.number("layer_norm_eps", EPS),
        paired=decoder.head_dim,
        logit_scale=config.number("logit_scale", LOGIT_SCALE),
    )
