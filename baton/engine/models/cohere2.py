"""Describes Command R7B and Command A (https://arxiv.org/abs/2504.00698): Command R with rope where a window is.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.cohere import command
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import partly_unturned
from baton.engine.program.program import Program

MAX_POSITION = 8192
WINDOW, FULL_EVERY = 4096, 4


def program(config: ModelConfig) -> Program:
    """Returns the decoder with a window in the layers that have rope."""
    every = config.size("sliding_window_pattern", FULL_EVERY)
    windows = config.alternating_windows(config.window(WINDOW), every)
    decoder = partly_unturned(replace(command(config), windows=windows), tuple(map(bool, windows)))
    return decoder.program(config, MAX_POSITION)
