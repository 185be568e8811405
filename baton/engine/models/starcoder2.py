"""Describes StarCoder2 (https://arxiv.org/abs/2402.19173): norms by mean and variance, MLPs without a gate, biases,
a window.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import GELU_TANH, Decoder
from baton.engine.program.program import Program
from baton.engine.program.variants.layer_norms import LayerNormDecoder

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION, KV_HEADS = 4096, 2
EPS = 1e-5


def program(config: ModelConfig) -> Program:
    """Returns the program of a StarCoder2 model, with one window in all layers; a null ``sliding_window`` means
    full attention. Raises CheckpointError.
    """
    bias = config.flag("use_bias", True)
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    plain = Decoder.read(config, None, KV_HEADS, tied=True, activation=("hidden_act", GELU_TANH), **biases)
    windows = (config.window(None),) * len(plain.windows)
    decoder = LayerNormDecoder.of(replace(plain, windows=windows, eps=config.number("norm_epsilon", EPS)))
    return decoder.program(config, MAX_POSITION)
