"""Describes Gemma 3's text models (https://arxiv.org/abs/2503.19786): five layers with a window to one without, a
rope each.

Knows nothing of weights' values.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from baton.engine.models.gemma2 import gemma
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Program, Rope

MAX_POSITION = 131072
WINDOW = 4096
FULL_EVERY = 6
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def program(config: ModelConfig) -> Program:
    """Returns the decoder with norms on q and k; layers with a window turn by a rope of their own."""
    config.must_be("attn_logit_softcapping")
    decoder = replace(gemma(config, qk_norm=True), final_softcap=config.cap("final_logit_softcapping", 0.0))
    windows = config.alternating_windows(config.window(WINDOW), config.size("sliding_window_pattern", FULL_EVERY))
    everywhere, local = ropes(config)
    local_layers = tuple(int(kind) for kind in _is_local(config, windows))
    decoder = replace(decoder, windows=windows, ropes=local_layers, local_ropes=(local,))
    return decoder.program(config, MAX_POSITION, everywhere)


def ropes(config: ModelConfig) -> tuple[Rope, Rope]:
    """Returns the rope of layers without a window and that of the others, in either spelling. Raises
    CheckpointError.
    """
    found = config.fields.get("rope_parameters")
    if isinstance(found, dict) and "rope_type" not in found:
        everywhere, local = (_object(config, found, kind) for kind in ("full_attention", "sliding_attention"))
        return config.rope_of(everywhere, GLOBAL_THETA), config.rope_of(local, LOCAL_THETA)
    everywhere = _object(config, config.fields, "rope_scaling")
    theta = config.number("rope_local_base_freq", LOCAL_THETA)
    return config.rope_of(everywhere, GLOBAL_THETA), Rope("default", theta, {})


def _object(config: ModelConfig, fields: dict[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise config.error(name, "must be an object")
    return found


def _is_local(config: ModelConfig, windows: tuple[int, ...]) -> list[bool]:
    kinds = config.fields.get("layer_types")
    if kinds is None:
        return [bool(window) for window in windows]
    return [kind == "sliding_attention" for kind in kinds]
