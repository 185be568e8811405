"""Describes Llama 4's text models (https://ai.meta.com/blog/llama-4-multimodal-intelligence): layers without rope,
and a shared expert beside one chosen for each token.

Knows nothing of weights' values. Chunked attention is full attention as long as the context isn't longer than a
chunk, to which it is limited.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.smollm3 import rotary_layers
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, Tempering, with_rope_in
from baton.engine.program.expert_layers import ExpertLayers, Routing, StackedNames
from baton.engine.program.program import Program
from baton.engine.program.variants.unweighted import UnweightedNorms

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 131072
HEAD_DIM, KV_HEADS = 128, 8
EPS, THETA = 1e-5, 500000.0
CHUNK, INTERVAL = 8192, 4
AT = "feed_forward"
NAMES = StackedNames(
    f"{AT}.router",
    f"{AT}.experts.gate_up_proj",
    f"{AT}.experts.down_proj",
    (f"{AT}.shared_expert.gate_proj", f"{AT}.shared_expert.up_proj"),
    f"{AT}.shared_expert.down_proj",
)


def program(config: ModelConfig) -> Program:
    """Returns the program of a Llama 4 text model, its context limited to ``attention_chunk_size``. Raises
    CheckpointError.
    """
    bias = config.flag("attention_bias", False)
    read = Decoder.read(config, HEAD_DIM, KV_HEADS, qkv_bias=bias, o_bias=bias)
    count = len(read.windows)
    plain = replace(
        read,
        eps=config.number("rms_norm_eps", EPS),
        inner=config.size("intermediate_size_mlp", 16384),
        paired=read.head_dim,
        renamed=((".mlp.", f".{AT}."),),
        experts=_experts(config, count, read.inner),
        tempering=_tempering(config),
    )
    rotary = with_rope_in(plain, rotary_layers(config, count, INTERVAL))
    decoder = UnweightedNorms.of(rotary) if config.flag("use_qk_norm", True) else rotary
    found = decoder.program(config, MAX_POSITION, config.rope(THETA))
    return replace(found, max_position=min(found.max_position, config.size("attention_chunk_size", CHUNK)))


def _tempering(config: ModelConfig) -> Tempering | None:
    if not _is_tempered(config):
        return None
    return Tempering(config.number("attn_scale", 0.1), config.number("floor_scale", 8192), 1, unrotated=True)


def _is_tempered(config: ModelConfig) -> bool:
    """Returns ``attn_temperature_tuning``, which Llama 4's first files state as a number (4: on)."""
    found = config.fields.get("attn_temperature_tuning")
    return found > 0 if type(found) is int else config.flag("attn_temperature_tuning", True)


def _experts(config: ModelConfig, count: int, inner: int) -> ExpertLayers:
    config.must_be("num_experts_per_tok", 1)
    step, layers = config.size("interleave_moe_layer_step", 1), config.fields.get("moe_layers")
    if layers is None:
        layers = list(range(step - 1, count, step))
    if not isinstance(layers, list):
        raise config.error("moe_layers", f"is {layers!r}; it must be a list of layers")
    sparse, experts = tuple(layer in layers for layer in range(count)), config.size("num_local_experts", 16)
    own = config.with_default("num_experts_per_tok", 1)
    found = ExpertLayers.read(
        own, sparse, experts, inner, False, AT, ("", "", ""), Routing("sigmoid"), shared=inner
    )
    return replace(found, names=NAMES, scaled=True)
