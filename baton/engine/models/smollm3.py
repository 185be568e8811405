"""Describes SmolLM3 (https://huggingface.co/blog/smollm3): Llama's decoder with every fourth layer without rope.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, with_rope_in
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 32768
KV_HEADS = 4
INTERVAL = 4  # of this many layers the last one has no rope
THETA = 2_000_000.0


def program(config: ModelConfig) -> Program:
    """Returns the program of a SmolLM3 model; ``no_rope_layers`` has a 1 for each layer with rope. Raises
    CheckpointError.
    """
    config.must_be("use_sliding_window", False)
    bias = config.flag("attention_bias", False)
    decoder = Decoder.read(
        config, None, KV_HEADS, True, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False)
    )
    rotary = rotary_layers(config, len(decoder.windows), INTERVAL)
    return with_rope_in(decoder, rotary).program(config, MAX_POSITION, config.rope(THETA))


def rotary_layers(config: ModelConfig, count: int, interval: int) -> tuple[bool, ...]:
    """Returns, for each of ``count`` layers, whether it has rope. Raises CheckpointError.

    Unless ``no_rope_layers`` is given, every ``interval``-th layer has none.
    """
    found = config.fields.get("no_rope_layers")
    if not found:
        interval = config.size("no_rope_layer_interval", interval)
        return tuple((layer + 1) % interval != 0 for layer in range(count))
    if not isinstance(found, list) or len(found) != count or not set(found) <= {0, 1}:
        raise config.error("no_rope_layers", f"must have a 0 or a 1 for each of {count} layers")
    return tuple(map(bool, found))
