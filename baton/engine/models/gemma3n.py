"""Describes the text model inside a Gemma 3n that also accepts images and sound; requests with these are refused
elsewhere.

Knows nothing of weights' values. Such a config.json omits the fields that have the text model's defaults.
"""

from __future__ import annotations

from baton.engine.models import gemma3n_text
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program

DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
}


def program(config: ModelConfig) -> Program:
    """Returns the program of the text model, described in ``text_config``. Raises CheckpointError."""
    return gemma3n_text.program(config.part("text_config", DEFAULTS))
