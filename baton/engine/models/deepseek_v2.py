"""Describes DeepSeek-V2 (https://arxiv.org/abs/2405.04434): latent attention, shared experts, groups of experts
chosen by softmax.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.program.config import ModelConfig
from baton.engine.program.expert_layers import ExpertLayers, Routing
from baton.engine.program.latent import Latent, LatentDecoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 2048
PARTS = ("gate_proj", "up_proj", "down_proj")
METHODS = ("greedy", "group_limited_greedy")


def program(config: ModelConfig) -> Program:
    """Returns the program of a DeepSeek-V2 model: experts after the first dense layers; rotations pair neighbours.
    Raises CheckpointError.
    """
    routing = Routing("softmax", *_groups(config), best=1, scale=config.number("routed_scaling_factor", 1.0))
    experts = experts_of(config, routing, dense=0, experts=64, shared=2, inner=1407, renormalise=False)
    return LatentDecoder.of(config, Latent.read(config, paired=True), experts).program(config, MAX_POSITION)


def experts_of(
    config: ModelConfig, routing: Routing, dense: int, experts: int, shared: int, inner: int, renormalise: bool
) -> ExpertLayers:
    """Returns the description of the expert layers of ``config``; the other arguments but ``routing`` are the
    architecture's defaults. Raises CheckpointError.

    ``dense`` is the number of first layers without experts, ``inner`` an expert's width, ``shared`` the number of
    shared experts.
    """
    config.must_be("mlp_bias", False)
    if config.fields.get("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "must be 1")
    count, first = config.size("num_hidden_layers"), config.count("first_k_dense_replace", dense)
    width, total = config.size("moe_intermediate_size", inner), config.size("n_routed_experts", experts)
    if total % routing.groups:
        raise config.error("n_group", f"is {routing.groups}; it must divide {total} experts")
    if routing.kept > routing.groups:
        raise config.error("topk_group", f"is {routing.kept}; there are {routing.groups} groups")
    if routing.groups > 1 and total // routing.groups < routing.best:
        raise config.error(
            "n_group", f"is {routing.groups}; a group of {total} experts has {routing.best} at least"
        )
    found = ExpertLayers.read(
        config, tuple(layer >= first for layer in range(count)), total, width, renormalise, "mlp", PARTS,
        routing=routing, shared=width * config.size("n_shared_experts", shared), shared_at="shared_experts",
    )  # fmt: skip
    within = routing.kept * (total // routing.groups)
    if found.chosen > within:
        text = f"is {routing.kept}; {found.chosen} experts of a row are chosen, and these groups have {within}"
        raise config.error("topk_group", text)
    return found


def _groups(config: ModelConfig) -> tuple[int, int]:
    """Returns the number of groups of experts, and how many of them a row's experts are chosen from."""
    method = config.fields.get("topk_method") or "greedy"
    if method not in METHODS:
        raise config.error("topk_method", f"is {method!r}; {' and '.join(METHODS)} are known")
    return (1, 1) if method == "greedy" else (config.size("n_group"), config.size("topk_group"))
