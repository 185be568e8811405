"""Describes the text model inside a Gemma 3 that also accepts images; requests with images are refused elsewhere.

Knows nothing of weights' values. Such a config.json omits the fields that have the text model's defaults.
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
    """Returns the program of the text model, described in ``text_config``. Raises CheckpointError."""
    return gemma3_text.program(config.part("text_config", DEFAULTS))
