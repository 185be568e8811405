"""Describes the text model inside a Gemma 3 that also sees images; images are refused where requests are read.

Knows nothing of weights' values. Such a config.json leaves out what is the text model's default.
"""

from __future__ import annotations

from baton.engine.models import gemma3_text
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def program(config: ModelConfig) -> Program:
    """Returns the program of ``text_config``. Raises CheckpointError."""
    return gemma3_text.program(config.part("text_config", DEFAULTS))
