"""Describes Qwen3's mixture of experts (https://arxiv.org/abs/2505.09388): experts in most layers.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.qwen2 import MAX_POSITION, WINDOW
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
KV_HEADS = 4
PARTS = ("gate_proj", "up_proj", "down_proj")


def program(config: ModelConfig) -> Program:
    """Returns the program of a Qwen3 model with experts in place of MLPs, except in layers that ``mlp_only_layers``
    or ``decoder_sparse_step`` exclude. Raises CheckpointError.
    """
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(config, kv_heads=KV_HEADS, qkv_bias=bias, o_bias=bias, qk_norm=True)
    count = len(decoder.windows)
    experts = ExpertLayers.read(
        config,
        sparse_layers(config, count),
        config.size("num_experts", config.fields.get("num_local_experts")),
        config.size("moe_intermediate_size"),
        config.flag("norm_topk_prob", False),
        "mlp",
        PARTS,
    )
    window = config.window(WINDOW) if config.flag("use_sliding_window", False) else 0
    return replace(decoder, windows=(window,) * count, experts=experts).program(config, MAX_POSITION)


def sparse_layers(config: ModelConfig, layers: int) -> tuple[bool, ...]:
    """Returns, for each of ``layers`` layers, whether it has experts in place of an MLP. Raises CheckpointError."""
    step, dense = config.size("decoder_sparse_step", 1), config.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error("mlp_only_layers", f"is {dense!r}; it must be a list of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
