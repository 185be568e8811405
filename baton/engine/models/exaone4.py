"""Describes EXAONE 4 (https://arxiv.org/abs/2507.11407): norms after attention and MLPs, norms of q and k, rope in
layers with a window.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, Norms, with_rope_in
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 2048
EPS = 1e-5
WINDOW, FULL_EVERY = 4096, 4


def program(config: ModelConfig) -> Program:
    """Returns the program of an EXAONE 4 model; if no layer has a window, every layer has rope. Raises
    CheckpointError.
    """
    decoder = replace(Decoder.read(config, qk_norm=True), norms=Norms.AFTER, eps=config.number("rms_norm_eps", EPS))
    if window := config.window(WINDOW):
        windows = config.alternating_windows(window, _full_every(config))
        decoder = with_rope_in(replace(decoder, windows=windows), tuple(map(bool, windows)))
    return decoder.program(config, MAX_POSITION)


def _full_every(config: ModelConfig) -> int:
    """Returns the period of layers without a window. Where ``layer_types`` names each layer's kind, it doesn't
    matter, and published files have letters there ("LLLG").
    """
    pattern = config.fields.get("sliding_window_pattern")
    named = isinstance(pattern, str) and config.fields.get("layer_types") is not None
    return FULL_EVERY if named else config.size("sliding_window_pattern", FULL_EVERY)
