"""Adds the residual and norms by the root mean square (https://arxiv.org/abs/1910.07467). Knows nothing of
layers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x (…, hidden) plus delta, and that sum normed, both (…, hidden) in x's dtype.

    The mean square is taken in float32 and the scale applied after rounding back, as Hugging Face does.
    """
    summed = x if delta is None else x + delta
    return summed, normed(summed, weight, eps)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) x weight over the last dimension; float32 weights count before rounding."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * scale * weight).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight
