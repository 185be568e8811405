"""Describes Nemotron-H and Nemotron Nano 2 (https://arxiv.org/abs/2504.03624): each layer has Mamba-2, attention
without rope, or an MLP.

Knows nothing of weights' values. Layers of experts aren't supported.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, Norms, with_rope_in
from baton.engine.program.hybrid import StateSpaceLayers, require_unlimited_steps
from baton.engine.program.program import Program
from baton.engine.program.variants.mixers import ATTENTION, MLP, STATES, MixerDecoder

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 4096
HEAD_DIM, KV_HEADS = 128, 8
ACTIVATION = "relu2"
PATTERN = {"M": STATES, "*": ATTENTION, "-": MLP}
KINDS = {
    "linear_attention": STATES,
    "mamba": STATES,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
}
RENAMED = (
    (".input_layernorm.", ".norm."),
    (".self_attn.", ".mixer."),
    (".mlp.", ".mixer."),
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
)


def program(config: ModelConfig) -> Program:
    """Returns the program of a Nemotron-H model, with one mixer in each layer. Raises CheckpointError."""
    config.must_be("attention_bias", False)
    config.must_be("mamba_hidden_act", "silu")
    config.must_be("tie_word_embeddings", False)  # transformers ties none, the model's own code does
    require_unlimited_steps(config)
    kinds = _kinds(config)
    own = config.with_default("num_hidden_layers", len(kinds))
    plain = Decoder.read(
        own, HEAD_DIM, KV_HEADS, activation=("mlp_hidden_act", ACTIVATION), mlp_bias=config.flag("mlp_bias", False)
    )
    eps = config.number("layer_norm_epsilon", 1e-5)
    plain = replace(plain, norms=Norms.ONE, eps=eps, renamed=RENAMED, windows=(0,) * len(kinds))
    unrotated = with_rope_in(plain, (False,) * len(kinds))
    keeps = tuple(kind == STATES for kind in kinds)
    mixed = MixerDecoder.of(unrotated, kinds=kinds, keeps=keeps, recurrent=_states(config, eps))
    return mixed.program(config, MAX_POSITION)


def _states(config: ModelConfig, eps: float) -> StateSpaceLayers:
    heads, groups = config.size("mamba_num_heads", 128), config.size("n_groups", 8)
    if heads % groups:
        raise config.error("n_groups", f"is {groups}; it must divide {heads} heads")
    sizes = (
        config.size("mamba_head_dim", 64),
        groups,
        config.size("ssm_state_size", 128),
        config.size("conv_kernel", 4),
    )
    biases = config.flag("use_conv_bias", True), config.flag("use_bias", False)
    return StateSpaceLayers(heads, *sizes, eps, *biases, at="mixer")


def _kinds(config: ModelConfig) -> tuple[str, ...]:
    """Returns each layer's kind, by ``layer_types`` or ``hybrid_override_pattern``. Raises CheckpointError."""
    named = config.fields.get("layer_types") or config.fields.get("layers_block_type")
    found, known = (named, KINDS) if named else (config.fields.get("hybrid_override_pattern"), PATTERN)
    if not isinstance(found, list | str) or not found or not set(found) <= set(known):
        raise config.error("layer_types", f"is {found!r}; a layer is one of {', '.join(known)}")
    kinds = tuple(known[each] for each in found)
    if not {STATES, ATTENTION} <= set(kinds):
        raise config.error("layer_types", "must name a layer with attention and one of Mamba")
    return kinds
