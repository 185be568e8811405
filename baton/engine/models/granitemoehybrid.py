"""Describes Granite 4 (https://www.ibm.com/granite): Mamba-2 in most layers or in none, experts in each or in none.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.granite import multiplied
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, with_rope_in
from baton.engine.program.expert_layers import ExpertLayers, StackedNames
from baton.engine.program.hybrid import HybridDecoder, StateSpaceLayers
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 2048
KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
RENAMED = ((".mlp.gate_up_proj", ".shared_mlp.input_linear"), (".mlp.down_proj", ".shared_mlp.output_linear"))
NAMES = StackedNames(
    "block_sparse_moe.router.layer",
    "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.output_linear.weight",
    ("shared_mlp.input_linear",),
    "shared_mlp.output_linear",
    rows=True,
)


def program(config: ModelConfig) -> Program:
    """Returns the program of a Granite 4 model: the hybrid, or a plain decoder if no layer has Mamba. Raises
    CheckpointError.
    """
    bias, shared = config.flag("attention_bias", False), config.size("shared_intermediate_size", 1024)
    read = Decoder.read(config, qkv_bias=bias, o_bias=bias, fused_mlp=True)
    count = len(read.windows)
    plain = replace(read, inner=shared, renamed=RENAMED, experts=_experts(config, count, read.inner, shared))
    plain = with_rope_in(plain, (config.fields.get("position_embedding_type") == "rope",) * count)
    keeps = _keeps(config, count)
    if not any(keeps):
        return multiplied(config, plain).program(config, MAX_POSITION)
    recurrent = StateSpaceLayers.read(config, plain.hidden, plain.eps)
    hybrid = HybridDecoder.of(plain, recurrent=recurrent, keeps=keeps)
    return multiplied(config, hybrid).program(config, MAX_POSITION)


def _experts(config: ModelConfig, count: int, inner: int, shared: int) -> ExpertLayers | None:
    total = config.count("num_local_experts", 8)
    if not total:
        return None
    found = ExpertLayers.read(config, (True,) * count, total, inner, True, "", ("", "", ""), shared=shared)
    return replace(found, names=NAMES)


def _keeps(config: ModelConfig, count: int) -> tuple[bool, ...]:
    """Returns which layers keep recurrent state, by ``layer_types``. Raises CheckpointError."""
    kinds = config.fields.get("layer_types") or config.fields.get("layers_block_type") or ["mamba"] * count
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= set(KINDS):
        raise config.error("layer_types", f"must name {count} layers, each one of {', '.join(KINDS)}")
    found = tuple(KINDS[kind] for kind in kinds)
    if all(found):
        raise config.error("layer_types", "must name a layer with attention")
    return found
