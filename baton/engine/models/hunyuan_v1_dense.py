"""Describes Hunyuan's dense models (https://github.com/Tencent-Hunyuan): norms of q and k after they are rotated.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program
from baton.engine.program.variants.late_norms import LateNorms

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 2048
EPS = 1e-5
RENAMED = ((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm."))


def program(config: ModelConfig) -> Program:
    """Returns the program of a dense Hunyuan model. Raises CheckpointError."""
    return decoder_of(config).program(config, MAX_POSITION)


def decoder_of(config: ModelConfig) -> LateNorms:
    """Returns the decoder that Hunyuan's models share. Raises CheckpointError, also if layers share K and V."""
    config.must_be("use_cla", False)
    bias = config.flag("attention_bias", False)
    plain = Decoder.read(config, qkv_bias=bias, o_bias=bias)
    return LateNorms.of(replace(plain, eps=config.number("rms_norm_eps", EPS), renamed=RENAMED))
