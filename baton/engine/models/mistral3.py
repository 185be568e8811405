"""Describes the text model inside Mistral Small 3.1 and similar models, which also accept images; requests with
images are refused elsewhere.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models import ministral, ministral3, mistral
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program

TEXT = {"mistral": mistral.program, "ministral": ministral.program, "ministral3": ministral3.program}


def program(config: ModelConfig) -> Program:
    """Returns the program of the text model, described in ``text_config``. Raises CheckpointError."""
    text = config.part("text_config")
    kind = text.fields.get("model_type", "mistral")
    if kind not in TEXT:
        raise config.error("text_config", f"has model_type {kind!r}; {', '.join(TEXT)} are known here")
    return TEXT[kind](text)
