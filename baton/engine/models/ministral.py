"""Describes Ministral (https://mistral.ai/news/ministraux): Mistral with a window in the layers that
``layer_types`` names.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.mistral import KV_HEADS, MAX_POSITION, WINDOW
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program


def program(config: ModelConfig) -> Program:
    """Returns the program of a Ministral model; without ``layer_types`` every layer has the window. Raises
    CheckpointError.
    """
    decoder, window = Decoder.read(config, kv_heads=KV_HEADS), config.window(WINDOW)
    return replace(decoder, windows=config.alternating_windows(window, len(decoder.windows) + 1)).program(
        config, MAX_POSITION
    )
