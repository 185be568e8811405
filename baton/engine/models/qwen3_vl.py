"""Describes the text model inside a Qwen3-VL, which also accepts images: Qwen3. Its rope turns three positions,
which are the same for text; requests with images are refused elsewhere.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models import qwen3
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program


def program(config: ModelConfig) -> Program:
    """Returns the program of the text model, described in ``text_config``. Raises CheckpointError."""
    return qwen3.program(config.part("text_config"))
