"""Describes OLMo 3 (https://allenai.org/olmo): OLMo 2 with a window in three of four layers, with different rope.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.gemma3_text import two_ropes
from baton.engine.models.olmo2 import MAX_POSITION, olmo
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
WINDOW, FULL_EVERY = 4096, 4
THETA = 500000.0


def program(config: ModelConfig) -> Program:
    """Returns the program of an OLMo 3 model: rope is scaled only in layers without a window. Raises
    CheckpointError.
    """
    windows = config.alternating_windows(config.window(WINDOW), FULL_EVERY)
    return two_ropes(config, replace(olmo(config), windows=windows), (THETA, THETA), MAX_POSITION)
