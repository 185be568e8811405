"""Describes Bamba: Mamba-2 in most layers, attention in some (https://huggingface.co/blog/bamba).

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.hybrid import HybridDecoder, StateSpaceLayers
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 262144
KV_HEADS, EPS = 8, 1e-5
RENAMED = (
    ("post_attention_layernorm", "pre_ff_layernorm"),
    (".mlp.", ".feed_forward."),
    ("model.norm.", "model.final_layernorm."),
)


def program(config: ModelConfig) -> Program:
    """Returns the program of a Bamba model. By default half of each head is rotated. Raises CheckpointError."""
    bias = config.flag("attention_bias", False)
    plain = Decoder.read(
        config.with_default("rms_norm_eps", EPS), None, KV_HEADS, qkv_bias=bias, o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False), partial_rotary=True,
    )  # fmt: skip
    hybrid = HybridDecoder.of(
        plain,
        recurrent=StateSpaceLayers.read(config, plain.hidden, plain.eps),
        keeps=_keeps(config, len(plain.windows)),
        renamed=RENAMED,
    )
    rope = config.rope()
    rotary = replace(rope, parameters={"partial_rotary_factor": 0.5} | rope.parameters)
    return hybrid.program(config, MAX_POSITION, rotary)


def _keeps(config: ModelConfig, count: int) -> tuple[bool, ...]:
    """Returns which layers keep recurrent state: those that ``attn_layer_indices`` leaves out."""
    found = config.fields.get("attn_layer_indices")
    if not isinstance(found, list) or not 0 < len(set(found) & set(range(count))) == len(found) < count:
        raise config.error("attn_layer_indices", f"must name some of {count} layers, and leave some out")
    return tuple(layer not in found for layer in range(count))
