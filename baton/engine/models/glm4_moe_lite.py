"""Describes GLM-4.7-Flash (https://huggingface.co/zai-org/GLM-4.7-Flash): latent attention and experts as in
DeepSeek-V3.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.deepseek_v2 import experts_of
from baton.engine.program.config import ModelConfig
from baton.engine.program.expert_layers import Routing
from baton.engine.program.latent import Latent, LatentDecoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 202752
EPS = 1e-5
SIZES = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}


def program(config: ModelConfig) -> Program:
    """Returns the program of a GLM-4.7-Flash model: experts after the first layers, with one shared by all tokens.
    Raises CheckpointError.
    """
    own = ModelConfig(config.path, SIZES | config.fields, config.eos_token_ids)
    groups, kept = own.size("n_group", 1), own.size("topk_group", 1)
    scale = own.number("routed_scaling_factor", 1.8)
    routing = Routing("sigmoid", groups, kept, best=2, scale=scale, biased=True)
    renormalise = own.flag("norm_topk_prob", True)
    experts = experts_of(own, routing, dense=1, experts=64, shared=1, inner=1536, renormalise=renormalise)
    layers = sparse_layers(own, experts.layers)
    latent = Latent.read(own, paired=own.flag("rope_interleave", True))
    decoder = LatentDecoder.of(own, latent, replace(experts, layers=layers))
    return replace(decoder, eps=own.number("rms_norm_eps", EPS)).program(own, MAX_POSITION)


def sparse_layers(config: ModelConfig, otherwise: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns, for each layer, whether ``mlp_layer_types`` gives it experts; ``otherwise`` if that is absent.
    Raises CheckpointError.
    """
    kinds = config.fields.get("mlp_layer_types")
    if kinds is None:
        return otherwise
    known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not known or len(kinds) != len(otherwise):
        raise config.error("mlp_layer_types", f"must name {len(otherwise)} layers, each one dense or sparse")
    return tuple(kind == "sparse" for kind in kinds)
