"""Describes Phi-3.5-MoE (https://arxiv.org/abs/2404.14219): norms by mean and variance, two experts chosen by
SparseMixer, longrope.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program
from baton.engine.program.rope import LONGROPE
from baton.engine.program.variants.layer_norms import LayerNormDecoder

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION, KV_HEADS, EXPERTS, CHOSEN = 131072, 8, 16, 2
EPS, THETA, JITTER = 1e-5, 1e6, 0.01
PARTS = ("w1", "w3", "w2")


def program(config: ModelConfig) -> Program:
    """Returns the program of a Phi-3.5-MoE model, with experts in every layer. Raises CheckpointError."""
    bias = config.flag("attention_bias", False)
    plain = Decoder.read(config, None, KV_HEADS, qkv_bias=bias, o_bias=bias)
    decoder = LayerNormDecoder.of(
        replace(
            plain,
            windows=(config.window(None),) * len(plain.windows),
            eps=config.number("rms_norm_eps", EPS),
            experts=_experts(config, len(plain.windows), plain.inner),
        ),
        head_bias=config.flag("lm_head_bias", False),
    )
    return _with_rope(config, decoder.program(config, MAX_POSITION, config.rope(THETA)))


def _experts(config: ModelConfig, layers: int, inner: int) -> ExpertLayers:
    own = config.with_default("num_experts_per_tok", CHOSEN)
    own.must_be("num_experts_per_tok", CHOSEN)
    count = config.size("num_local_experts", EXPERTS)
    found = ExpertLayers.read(own, (True,) * layers, count, inner, True, "block_sparse_moe", PARTS)
    return replace(found, jitter=config.number("router_jitter_noise", JITTER))


def _with_rope(config: ModelConfig, found: Program) -> Program:
    """Returns the program with longrope's factor on cos and sin, of which the config gives one for contexts up to
    the original one, and one for longer ones. Raises CheckpointError.
    """
    if found.rope.kind == "default":
        return found
    if found.rope.kind != LONGROPE:
        raise config.error("rope_parameters", f"has rope type {found.rope.kind!r}; default and longrope are known")
    parameters = found.rope.parameters
    needed = "short_mscale", "long_mscale", "original_max_position_embeddings"
    if missing := [name for name in needed if name not in parameters]:
        raise config.error("rope_parameters", f"lacks {', '.join(missing)}, which longrope needs here")
    rope = replace(found.rope, parameters=parameters | {"attention_factor": parameters["short_mscale"]})
    return replace(found, rope=rope, plain_context=int(parameters["original_max_position_embeddings"]))
