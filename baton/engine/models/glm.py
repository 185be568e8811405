"""Describes the first GLM-4-9B (https://arxiv.org/abs/2406.12793): GLM-4 with norms only before attention and MLPs.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.glm4 import glm
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Norms
from baton.engine.program.program import Program


def program(config: ModelConfig) -> Program:
    """Returns the program of a GLM-4-9B model, with norms before attention and MLPs. Raises CheckpointError."""
    return glm(config, Norms.BEFORE)
