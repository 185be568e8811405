"""Describes Hunyuan-A13B (https://github.com/Tencent-Hunyuan/Hunyuan-A13B): the dense model's layers with experts,
and one that all tokens share.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.hunyuan_v1_dense import MAX_POSITION, RENAMED, decoder_of
from baton.engine.models.qwen3_moe import PARTS
from baton.engine.program.config import ModelConfig
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program

ROUTER = ((".mlp.gate.weight", ".mlp.gate.wg.weight"),)


def program(config: ModelConfig) -> Program:
    """Returns the program of a Hunyuan model with experts, whose weights sum to 1, in every layer. Raises
    CheckpointError.
    """
    decoder, layers = decoder_of(config), config.size("num_hidden_layers")
    inner, shared = _same(config, "moe_intermediate_size", decoder.inner), _same(config, "num_shared_expert", 1)
    if inner != decoder.inner or shared != 1:
        raise config.error("num_shared_expert", "must be 1, and experts as wide as intermediate_size")
    own = config.with_default("num_experts_per_tok", _same(config, "moe_topk", 1))
    experts = ExpertLayers.read(
        own, (True,) * layers, _same(config, "num_experts", 1), inner, True, "mlp", PARTS,
        shared=inner, shared_at="shared_mlp",
    )  # fmt: skip
    return replace(decoder, experts=experts, renamed=RENAMED + ROUTER).program(config, MAX_POSITION)


def _same(config: ModelConfig, name: str, default: int) -> int:
    """Returns field ``name``, a number or a list with the same number for each layer. Raises CheckpointError."""
    found = config.fields.get(name)
    if isinstance(found, list) and found and all(each == found[0] for each in found):
        return ModelConfig(config.path, {name: found[0]}, config.eos_token_ids).size(name)
    return config.size(name, default)
