"""Describes Jamba (https://arxiv.org/abs/2403.19887): Mamba in most layers, attention without rope in some, experts
in every other one.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.qwen3_moe import PARTS
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, with_rope_in
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.hybrid import HybridDecoder
from baton.engine.program.program import Program
from baton.engine.program.selective import SelectiveLayers

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 262144
KV_HEADS, EXPERTS, CHOSEN = 8, 16, 2
RENAMED = (
    (".feed_forward.gate.", ".feed_forward.router."),
    (".mlp.", ".feed_forward."),
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("model.norm.", "model.final_layernorm."),
)


def program(config: ModelConfig) -> Program:
    """Returns the program of a Jamba model. Raises CheckpointError."""
    plain = Decoder.read(config, None, KV_HEADS)
    layers = len(plain.windows)
    keeps = tuple(not each for each in _every(config, "attn_layer", (8, 4), layers))
    if all(keeps) or not any(keeps):
        raise config.error("attn_layer_period", "must give some layers attention, and others Mamba")
    hybrid = HybridDecoder.of(
        with_rope_in(plain, (False,) * layers),
        recurrent=SelectiveLayers.read(config, plain.hidden, plain.eps),
        keeps=keeps,
        experts=_experts(config, layers, plain.inner),
        renamed=RENAMED,
    )
    return hybrid.program(config, MAX_POSITION)


def _experts(config: ModelConfig, layers: int, inner: int) -> ExpertLayers | None:
    count, sparse = config.size("num_experts", EXPERTS), _every(config, "expert_layer", (2, 1), layers)
    if count == 1 or not any(sparse):
        return None
    own = config.with_default("num_experts_per_tok", CHOSEN)
    return ExpertLayers.read(own, sparse, count, inner, False, "feed_forward", PARTS)


def _every(config: ModelConfig, name: str, default: tuple[int, int], layers: int) -> tuple[bool, ...]:
    """Returns, for each layer, whether it is one of those that ``name``'s period and offset select. Raises
    CheckpointError.
    """
    period, offset = config.size(f"{name}_period", default[0]), config.count(f"{name}_offset", default[1])
    if offset >= period:
        raise config.error(f"{name}_offset", f"is {offset}; it must be below the period of {period} layers")
    return tuple(layer % period == offset for layer in range(layers))
