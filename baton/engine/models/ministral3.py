"""Describes Ministral 3 (https://mistral.ai/news/mistral-3): Mistral whose queries are scaled by position.

Knows nothing of weights' values.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.engine.models.mistral import KV_HEADS
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import Decoder, Tempering
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 262144
HEAD_DIM = 128
EPS = 1e-5
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def program(config: ModelConfig) -> Program:
    """Returns the program of a Ministral 3 model; a null ``sliding_window`` means full attention. Raises
    CheckpointError.
    """
    decoder, rope = Decoder.read(config, HEAD_DIM, KV_HEADS), config.with_default("rope_parameters", YARN).rope()
    for name in (BETA, ORIGINAL):
        if name not in rope.parameters:
            raise config.error("rope_parameters", f"has no {name}")
    found = replace(
        decoder,
        eps=config.number("rms_norm_eps", EPS),
        windows=(config.window(None),) * len(decoder.windows),
        tempering=Tempering(rope.parameters[BETA], rope.parameters[ORIGINAL], 0, unrotated=False),
    )
    return found.program(config, MAX_POSITION, rope)
