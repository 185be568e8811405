"""Describes Phi-3, 3.5 and 4, also mini (https://arxiv.org/abs/2404.14219): fused matrices, a part of each head
rotated, longrope.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program
from baton.engine.program.rope import LONGROPE

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION, ORIGINAL_CONTEXT = 4096, 4096
EPS = 1e-5
OTHER_NAMES = ("su", "yarn")  # of longrope in Phi-3's first checkpoints


def program(config: ModelConfig) -> Program:
    """Returns the program of a Phi-3 or Phi-4 model, with one window in all layers; a null ``sliding_window`` means
    full attention. Raises CheckpointError.
    """
    config.must_be("attention_bias", False)
    decoder = Decoder.read(config, fused=True, partial_rotary=True)
    windows, eps = (config.window(None),) * len(decoder.windows), config.number("rms_norm_eps", EPS)
    found = replace(decoder, windows=windows, eps=eps).program(config, MAX_POSITION)
    kind = LONGROPE if found.rope.kind in OTHER_NAMES else found.rope.kind
    if kind not in ("default", LONGROPE):
        raise config.error("rope_parameters", f"has rope type {kind!r}; default and {LONGROPE} are known here")
    original = int(found.rope.parameters.get("original_max_position_embeddings", ORIGINAL_CONTEXT))
    return replace(found, rope=replace(found.rope, kind=kind), plain_context=original if kind == LONGROPE else 0)
