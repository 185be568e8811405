"""Describes DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437): V2's attention, experts chosen by sigmoid scores
with a bias.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.deepseek_v2 import experts_of
from baton.engine.program.config import ModelConfig
from baton.engine.program.expert_layers import Routing
from baton.engine.program.latent import Latent, LatentDecoder
from baton.engine.program.program import Program

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 4096


def program(config: ModelConfig) -> Program:
    """Returns the program of a DeepSeek-V3 model; a group's score is the sum of its two best experts', corrected by
    a learned bias. Raises CheckpointError.
    """
    groups, scale = config.size("n_group", 8), config.number("routed_scaling_factor", 2.5)
    routing = Routing("sigmoid", groups, config.size("topk_group", 4), best=2, scale=scale, biased=True)
    renormalise = config.flag("norm_topk_prob", True)
    experts = experts_of(config, routing, dense=3, experts=256, shared=1, inner=2048, renormalise=renormalise)
    latent = Latent.read(config, paired=config.flag("rope_interleave", True))
    return LatentDecoder.of(config, latent, experts).program(config, MAX_POSITION)
