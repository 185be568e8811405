"""SmoothQuant (https://arxiv.org/abs/2211.10438): moves outliers from activations to weights.

Knows nothing of files. Inputs are divided by most(|x|)^a / most(|w|)^(1 - a); the strength a is searched for by the
error of the outputs on rows of the calibration text, with weights rounded by row and activations by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.quantize.grids import Grid, to_nearest
from baton.quantize.methods.awq import Tie, normalised
from baton.quantize.stats import ActivationStats

STRENGTHS = tuple(step / 20 for step in range(20))


def best_scales(weight: Tensor, stats: ActivationStats, grid: Grid, tie: Tie) -> Tensor:
    """Returns the scales (k,) for a weight's inputs with the least output error; all ones if none is better.

    ``tie`` evens out the scales of inputs that must share theirs.
    """
    rows = stats.rows
    exact, best, least = rows @ weight.T, torch.ones(weight.shape[1]), float("inf")
    for strength in (None, *STRENGTHS):
        scales = best if strength is None else tie(_scales(weight, stats.most, strength))
        found = by_token(rows / scales) @ to_nearest(weight * scales, grid).values().T
        if (error := float((found - exact).square().sum())) < least:
            best, least = scales, error
    return best


def by_token(rows: Tensor) -> Tensor:
    """Returns ``rows`` rounded to int8 steps of each row's own scale, as float."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
    return torch.round(rows / scale) * scale


def _scales(weight: Tensor, most: Tensor, strength: float) -> Tensor:
    heavy = weight.abs().amax(0).clamp_min(1e-5)
    return normalised(most.clamp_min(1e-5).pow(strength) / heavy.pow(1 - strength))
