"""Describes the text model inside a Qwen3.5 with experts that also accepts images; requests with images are refused
elsewhere.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models import qwen3_5_moe_text
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program


def program(config: ModelConfig) -> Program:
    """Returns the program of the text model, described in ``text_config``. Raises CheckpointError."""
    return qwen3_5_moe_text.program(config.part("text_config"))
