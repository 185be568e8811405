"""Describes Gemma 3's text models (https://arxiv.org/abs/2503.19786): five layers with a window to one without,
with different rope.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.gemma2 import gemma
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder
from baton.engine.program.program import Program, Rope
from baton.protos.json import Json

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 131072
WINDOW = 4096
FULL_EVERY = 6
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def program(config: ModelConfig) -> Program:
    """Returns the program of a Gemma 3 text model, with norms of q and k; layers with a window have a rope of their
    own. Raises CheckpointError.
    """
    config.must_be("attn_logit_softcapping")
    decoder = replace(gemma(config, qk_norm=True), final_softcap=config.cap("final_logit_softcapping", 0.0))
    windows = config.alternating_windows(config.window(WINDOW), config.size("sliding_window_pattern", FULL_EVERY))
    return two_ropes(config, replace(decoder, windows=windows), (GLOBAL_THETA, LOCAL_THETA), MAX_POSITION)


def two_ropes(config: ModelConfig, decoder: Decoder, thetas: tuple[float, float], max_position: int) -> Program:
    """Returns the program of ``decoder`` with one rope in layers of full attention and another in layers with a
    window.

    ``thetas`` are the default bases of both, ``max_position`` is the default context length. Either spelling of
    config.json is read. Raises CheckpointError.
    """
    everywhere, local = ropes_of(config, *thetas)
    local_layers = tuple(int(kind) for kind in _is_local(config, decoder.windows))
    return replace(decoder, ropes=local_layers, local_ropes=(local,)).program(config, max_position, everywhere)


def ropes_of(config: ModelConfig, global_theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """Returns the rope of layers with full attention and that of layers with a window, in either spelling. Raises
    CheckpointError.

    ``global_theta`` and ``local_theta`` are their default bases.
    """
    found = config.fields.get("rope_parameters")
    if isinstance(found, dict) and "rope_type" not in found:
        everywhere, local = (_object(config, found, kind) for kind in ("full_attention", "sliding_attention"))
        return config.rope_of(everywhere, global_theta), config.rope_of(local, local_theta)
    everywhere = _object(config, config.fields, "rope_scaling")
    theta = config.number("rope_local_base_freq", local_theta)
    return config.rope_of(everywhere, global_theta), Rope("default", theta, {})


def _object(config: ModelConfig, fields: Json, name: str) -> Json:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise config.error(name, "must be an object")
    return found


def _is_local(config: ModelConfig, windows: tuple[int, ...]) -> list[bool]:
    kinds = config.fields.get("layer_types")
    if kinds is None:
        return [bool(window) for window in windows]
    return [kind == "sliding_attention" for kind in kinds]
