"""Adds the residual and normalizes by the root mean square (https://arxiv.org/abs/1910.07467).

Knows nothing of layers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x (…, hidden) plus delta, and that sum normalized, both (…, hidden) in x's dtype.

    The mean square is computed in float32 and the weight applied after rounding back, as in Hugging Face.
    """
    summed = x if delta is None else x + delta
    return summed, normed(summed, weight, eps)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) x weight over the last dimension; a float32 weight is applied before
    rounding.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * scale * weight).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight
