"""Describes Qwen3-Next: three layers of gated delta nets to one of gated attention, experts in each, one of them
shared.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.qwen3_moe import PARTS, sparse_layers
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.hybrid import GatedDeltaLayers, HybridDecoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 32768
HEAD_DIM, KV_HEADS = 256, 2
INTERVAL = 4  # of this many layers the last one has attention
ROTARY = "partial_rotary_factor"
KINDS = {"linear_attention": True, "full_attention": False}  # whether a layer keeps recurrent state


def program(config: ModelConfig) -> Program:
    """Returns the program of a Qwen3-Next model; a gated delta net's q, k, v and z lie head by head in one tensor.
    Raises CheckpointError.
    """
    return delta_hybrid(config, KV_HEADS, _experts(config, config.size("num_hidden_layers")), grouped=True)


def delta_hybrid(config: ModelConfig, kv_heads: int, experts: ExpertLayers | None, grouped: bool) -> Program:
    """Returns the program of Qwen's hybrid of gated delta nets and gated attention. By default a quarter of each
    head is rotated. Raises CheckpointError.

    ``kv_heads`` is the default number of KV heads; ``grouped`` is that of ``GatedDeltaLayers``.
    """
    bias = config.flag("attention_bias", False)
    plain = Decoder.read(config, HEAD_DIM, kv_heads, qkv_bias=bias, o_bias=bias, partial_rotary=True)
    rope = config.rope()
    hybrid = HybridDecoder.of(
        plain,
        norm_plus=1.0,
        gated=True,
        experts=experts,
        recurrent=GatedDeltaLayers.read(config, plain.eps, grouped),
        keeps=recurrent_layers(config, len(plain.windows)),
    )
    rotary = replace(rope, parameters={ROTARY: 0.25} | rope.parameters)
    return hybrid.program(config, MAX_POSITION, rotary)


def recurrent_layers(config: ModelConfig, count: int) -> tuple[bool, ...]:
    """Returns, for each of ``count`` layers, whether it keeps recurrent state, by ``layer_types`` or
    ``full_attention_interval``. Raises CheckpointError.
    """
    kinds = config.fields.get("layer_types")
    if kinds is None:
        interval = config.size("full_attention_interval", INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(count))
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) != set(KINDS):
        raise config.error("layer_types", f"must name {count} layers, of each of {', '.join(KINDS)}")
    return tuple(KINDS[kind] for kind in kinds)


def _experts(config: ModelConfig, count: int) -> ExpertLayers:
    return ExpertLayers.read(
        config,
        sparse_layers(config, count),
        config.size("num_experts", 512),
        config.size("moe_intermediate_size", 512),
        config.flag("norm_topk_prob", True),
        "mlp",
        PARTS,
        shared=config.size("shared_expert_intermediate_size", 512),
        shared_at="shared_expert",
        shared_gate=True,
    )
