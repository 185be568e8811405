"""Describes Command R7B and Command A (https://arxiv.org/abs/2504.00698): Command R with rope in the layers that
have a window.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.cohere import command
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import with_rope_in
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 8192
WINDOW, FULL_EVERY = 4096, 4


def program(config: ModelConfig) -> Program:
    """Returns the program of a Command R7B or Command A model: layers with a window have rope, the others none.
    Raises CheckpointError.
    """
    every = config.size("sliding_window_pattern", FULL_EVERY)
    windows = config.alternating_windows(config.window(WINDOW), every)
    decoder = with_rope_in(replace(command(config), windows=windows), tuple(map(bool, windows)))
    return decoder.program(config, MAX_POSITION)
