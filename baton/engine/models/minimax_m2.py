"""Describes MiniMax-M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2): experts in every layer, chosen by sigmoid
scores with a bias, q and k normed over all heads, and partly rotated heads.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.mixtral import PARTS
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.expert_layers import ExpertLayers, Routing
from baton.engine.program.program import Program, Rope

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 196608
HEAD_DIM, KV_HEADS, EXPERTS = 128, 8, 256
THETA = 5_000_000.0
ROTARY = "partial_rotary_factor"
RENAMED = ((".gate.e_score_correction_bias", ".e_score_correction_bias"),)


def program(config: ModelConfig) -> Program:
    """Returns the program of a MiniMax-M2 model. Raises CheckpointError, also for layers of other kinds of
    attention or experts.
    """
    config.must_be("use_qk_norm", True)
    config.must_be("qk_norm_type", "per_layer")
    config.must_be("scoring_func", "sigmoid")
    config.must_be("shared_intermediate_size", 0)
    kinds = config.fields.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise config.error("attn_type_list", "must be 1, full attention, for every layer")
    decoder = Decoder.read(config, HEAD_DIM, KV_HEADS, wide_qk_norm=True, partial_rotary=True)
    routing, layers = Routing("sigmoid", biased=True), (True,) * len(decoder.windows)
    experts = ExpertLayers.read(
        config, layers, config.size("num_local_experts", EXPERTS), decoder.inner, True, "block_sparse_moe", PARTS,
        routing=routing,
    )  # fmt: skip
    rope = _rope(config, decoder.head_dim)
    return replace(decoder, experts=experts, renamed=RENAMED).program(config, MAX_POSITION, rope)


def _rope(config: ModelConfig, head_dim: int) -> Rope:
    """Returns the rotary embedding, of which older files give the rotated dims of a head (``rotary_dim``)."""
    rope = config.rope(THETA)
    share = config.size("rotary_dim", head_dim) / head_dim
    return replace(rope, parameters={ROTARY: share} | rope.parameters)
