"""Describes Qwen2 and 2.5 (https://arxiv.org/abs/2407.10671): biases on q, k and v. Knows nothing of weights'
values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 32768
WINDOW = 4096
KV_HEADS = 32


def program(config: ModelConfig) -> Program:
    """Returns the program of a Qwen2 model; with ``use_sliding_window`` the upper layers have a window. Raises
    CheckpointError.
    """
    return windowed(config, Decoder.read(config, kv_heads=KV_HEADS, qkv_bias=True)).program(config, MAX_POSITION)


def windowed(config: ModelConfig, decoder: Decoder) -> Decoder:
    """Returns ``decoder`` with a window in the layers that ``layer_types`` or ``max_window_layers`` say, if
    ``use_sliding_window`` is set. Raises CheckpointError.
    """
    window = config.window(WINDOW) if config.flag("use_sliding_window", False) else 0
    return replace(decoder, windows=config.layer_windows(len(decoder.windows), window))
