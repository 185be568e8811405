"""Describes GLM-4-9B as it first came (https://arxiv.org/abs/2406.12793): GLM-4 with norms before alone.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.glm4 import glm
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Norms
from baton.engine.program.program import Program


def program(config: ModelConfig) -> Program:
    """Returns the decoder with norms before attention and MLPs."""
    return glm(config, Norms.BEFORE)
