"""Describes Gemma 2 (https://arxiv.org/abs/2408.00118): soft-capped scores and logits, a window in every other
layer.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import GELU_TANH, Decoder, Norms
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 8192
WINDOW = 4096
HEAD_DIM, QUERY_SCALAR = 256, 256.0
KV_HEADS = 4
SOFTCAP, FINAL_SOFTCAP = 50.0, 30.0
FULL_EVERY = 2


def program(config: ModelConfig) -> Program:
    """Returns the program of a Gemma 2 model, with norms around attention and MLPs; a null soft cap means none.
    Raises CheckpointError.
    """
    decoder = replace(
        gemma(config, qk_norm=False),
        softcap=config.cap("attn_logit_softcapping", SOFTCAP),
        final_softcap=config.cap("final_logit_softcapping", FINAL_SOFTCAP),
    )
    windows = config.alternating_windows(config.window(WINDOW), FULL_EVERY)
    return replace(decoder, windows=windows).program(config, MAX_POSITION)


def gemma(config: ModelConfig, qk_norm: bool) -> Decoder:
    """Returns the decoder that Gemma 2 and 3 share: norm weights stored less 1, scaled embeddings, GELU, the scale
    of queries. Raises CheckpointError.

    ``qk_norm`` adds norms of q and k.
    """
    config.must_be("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", False)
    activation = "hidden_activation", GELU_TANH
    decoder = Decoder.read(
        config, HEAD_DIM, KV_HEADS, True, activation, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm
    )
    return replace(
        decoder,
        norms=Norms.AROUND,
        norm_plus=1.0,
        embed_scale=decoder.hidden**0.5,
        query_scalar=config.number("query_pre_attn_scalar", QUERY_SCALAR),
    )
