"""Norms by mean and variance (https://arxiv.org/abs/1607.06450), and the mean alone subtracted.

Knows nothing of layers.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns x (rows, width) plus delta, and that sum normed by mean and variance, times ``weight`` plus ``bias``,
    both in x's dtype.
    """
    summed = x if delta is None else x + delta
    own = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return summed, F.layer_norm(summed, weight.shape, *own, eps)


def center(x: Tensor) -> Tensor:
    """Returns x (rows, width) minus each row's mean."""
    return x - x.mean(-1, keepdim=True)
