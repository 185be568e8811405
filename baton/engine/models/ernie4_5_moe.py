"""Describes ERNIE 4.5's models with experts (https://ernie.baidu.com): the dense ones' attention, and experts
chosen by a softmax with a bias.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.ernie4_5 import EPS, MAX_POSITION, THETA
from baton.engine.models.qwen3_moe import PARTS
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers, Routing
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields.
KV_HEADS = 4
EXPERTS, CHOSEN, SHARED, INNER, LEAST = 64, 6, 2, 1536, 1e-12
MOST_LEAST = 1e-6  # of ``moe_norm_min``: chosen scores hardly ever sum to less
RENAMED = ((".gate.e_score_correction_bias", ".moe_statics.e_score_correction_bias"),)


def program(config: ModelConfig) -> Program:
    """Returns the program of an ERNIE 4.5 model with experts, whose weights sum to 1. Raises CheckpointError, also
    if ``use_bias`` is set or ``moe_norm_min`` is more than 1e-6.
    """
    config.must_be("use_bias", False)
    if (least := config.number("moe_norm_min", LEAST)) > MOST_LEAST:
        raise config.error("moe_norm_min", f"is {least}; weights are divided by their sum here, however small")
    decoder = Decoder.read(config, kv_heads=KV_HEADS, tied=True)
    inner, shared = config.size("moe_intermediate_size", INNER), config.count("moe_num_shared_experts", SHARED)
    own = config.with_default("num_experts_per_tok", config.size("moe_k", CHOSEN))
    experts = ExpertLayers.read(
        own, _sparse_layers(config, len(decoder.windows)), config.size("moe_num_experts", EXPERTS), inner, True,
        "mlp", PARTS, routing=Routing("softmax", biased=True, bias_rows=1), shared=inner * shared,
        shared_at="shared_experts",
    )  # fmt: skip
    eps = config.number("rms_norm_eps", EPS)
    found = replace(decoder, eps=eps, paired=decoder.head_dim, experts=experts, renamed=RENAMED)
    return found.program(config, MAX_POSITION, config.rope(THETA))


def _sparse_layers(config: ModelConfig, layers: int) -> tuple[bool, ...]:
    """Returns, for each layer, whether it has experts: those from ``moe_layer_start_index`` to
    ``moe_layer_end_index`` (-1: the last) at each ``moe_layer_interval``.
    """
    step, first, last = config.size("moe_layer_interval", 1), config.count("moe_layer_start_index", 1), layers - 1
    if config.fields.get("moe_layer_end_index") not in (None, -1):
        last = config.count("moe_layer_end_index", last)
    return tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(layers))
