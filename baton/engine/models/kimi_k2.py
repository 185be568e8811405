"""Describes Kimi K2 (https://arxiv.org/abs/2507.20534): DeepSeek-V3 with other sizes.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models import deepseek_v3
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program


def program(config: ModelConfig) -> Program:
    """Returns the program of a Kimi K2 model. Raises CheckpointError."""
    return deepseek_v3.program(config)
