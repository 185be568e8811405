"""Describes Qwen3.5's text model: three gated delta nets to a layer of gated attention, without experts.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.qwen3_next import delta_hybrid
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program

KV_HEADS = 4


def program(config: ModelConfig) -> Program:
    """Returns the hybrid; q, k and v of a gated delta net are one matrix, z, b and a are others."""
    return delta_hybrid(config, KV_HEADS, None, grouped=False)
