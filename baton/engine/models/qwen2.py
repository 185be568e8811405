"""Describes Qwen2 and 2.5 (https://arxiv.org/abs/2407.10671): biases on q, k and v. Knows nothing of weights'
values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program

MAX_POSITION = 32768
WINDOW = 4096
KV_HEADS = 32


def program(config: ModelConfig) -> Program:
    """Returns the decoder with QKV biases; ``use_sliding_window`` gives the upper layers a window."""
    return windowed(config, Decoder.read(config, kv_heads=KV_HEADS, qkv_bias=True)).program(config, MAX_POSITION)


def windowed(config: ModelConfig, decoder: Decoder) -> Decoder:
    """Returns ``decoder`` with Qwen's mix of full and windowed layers."""
    window = config.window(WINDOW) if config.flag("use_sliding_window", False) else 0
    return replace(decoder, windows=config.layer_windows(len(decoder.windows), window))
