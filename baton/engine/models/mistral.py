"""Describes Mistral (https://arxiv.org/abs/2310.06825): each layer attends ``sliding_window`` tokens back.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 4096 * 32
WINDOW = 4096
KV_HEADS = 8


def program(config: ModelConfig) -> Program:
    """Returns the program of a Mistral model, with one window in all layers; a null ``sliding_window`` means full
    attention. Raises CheckpointError.
    """
    decoder = Decoder.read(config, kv_heads=KV_HEADS)
    return replace(decoder, windows=(config.window(WINDOW),) * len(decoder.windows)).program(config, MAX_POSITION)
