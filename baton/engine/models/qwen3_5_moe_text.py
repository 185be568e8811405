"""Describes Qwen3.5's text models with experts: Qwen3-Next's layers, experts in every layer.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.qwen3_moe import PARTS
from baton.engine.models.qwen3_next import delta_hybrid
from baton.engine.program.config import ModelConfig
from baton.engine.program.expert_layers import ExpertLayers
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
KV_HEADS = 2


def program(config: ModelConfig) -> Program:
    """Returns the program of a Qwen3.5 text model with experts in every layer, one of them shared. Raises
    CheckpointError.
    """
    inner, shared = (
        config.size(name, 512) for name in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )
    layers = (True,) * config.size("num_hidden_layers")
    found = ExpertLayers.read(
        config, layers, config.size("num_experts", 256), inner, True, "mlp", PARTS,
        shared=shared, shared_at="shared_expert", shared_gate=True,
    )  # fmt: skip
    return delta_hybrid(config, KV_HEADS, found, grouped=False)
