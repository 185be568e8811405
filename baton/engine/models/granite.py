"""Describes Granite 3's dense models (https://arxiv.org/abs/2505.08699): Llama's decoder with four multipliers.

Knows nothing of weights' values.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 2048
AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)


def program(config: ModelConfig) -> Program:
    """Returns the program of a dense Granite 3 model; ``attention_bias`` and ``mlp_bias`` add biases to all of
    their projections. Raises CheckpointError.
    """
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))
    return multiplied(config, decoder).program(config, MAX_POSITION)


def multiplied(config: ModelConfig, decoder: AnyDecoder) -> AnyDecoder:
    """Returns ``decoder`` with Granite's multipliers of embeddings, residuals, scores and logits. Raises
    CheckpointError unless they are above 0.

    The residual stream is kept divided by the residual multiplier: norms cancel the division, with their eps
    adapted.
    """
    embedding, residual, scores, logits = (
        _above_zero(config, f"{name}_{how}")
        for name, how in (("embedding", "multiplier"), ("residual", "multiplier"), ("attention", "multiplier"),
                          ("logits", "scaling"))
    )  # fmt: skip
    return replace(
        decoder,
        embed_scale=embedding / residual,
        eps=decoder.eps / residual**2,
        query_scalar=scores**-2,
        logit_scale=1.0 / logits,
    )


def _above_zero(config: ModelConfig, name: str) -> float:
    found = config.number(name, 1.0)
    if found <= 0:
        raise config.error(name, f"is {found:g}; it must be above 0")
    return found
