"""Describes Qwen3.5's text model: three layers of gated delta nets to one of gated attention, without experts.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.qwen3_next import delta_hybrid
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
KV_HEADS = 4


def program(config: ModelConfig) -> Program:
    """Returns the program of a Qwen3.5 text model; a gated delta net's q, k and v are one tensor, z, b and a are
    others. Raises CheckpointError.
    """
    return delta_hybrid(config, KV_HEADS, None, grouped=False)
