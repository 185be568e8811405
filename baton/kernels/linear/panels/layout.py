"""Lays tensors of rows out in panels of 64 rows, and back (linear.h draws them).

Knows nothing of kinds of weights or of kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL = 64  # rows of a panel


def nibbles(steps: Tensor) -> Tensor:
    """Returns two steps of bytes below 16 packed into one."""
    pairs = steps.view(-1, 2, PANEL * 4)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).reshape(-1)


def in_steps(x: Tensor, step: int, width: int, fill: int = 0) -> Tensor:
    """Returns (n, k) as [panel][width / step][64][step], flat."""
    n, k = x.shape
    panels = -(-n // PANEL)
    out = torch.full((panels * PANEL, width), fill, dtype=x.dtype)
    out[:n, :k] = x
    return out.view(panels, PANEL, width // step, step).transpose(1, 2).reshape(-1)


def from_steps(x: Tensor, step: int, n: int, k: int) -> Tensor:
    """Returns what ``in_steps`` laid out as (n, k) again."""
    panels = -(-n // PANEL)
    return x.view(panels, -1, PANEL, step).transpose(1, 2).reshape(panels * PANEL, -1)[:n, :k]


def in_panels(x: Tensor) -> Tensor:
    """Returns (n, groups) float32 as (panels, groups, 64) float16."""
    return F.pad(x, (0, 0, 0, -len(x) % PANEL)).view(-1, PANEL, x.shape[1]).transpose(1, 2).half().contiguous()


def whole_panels(x: Tensor) -> Tensor:
    """Returns the numbers of rows (n,), zeros behind them as far as the last panel goes."""
    return F.pad(x, (0, -len(x) % PANEL)).contiguous()


def spread(x: Tensor, group: int, n: int, k: int) -> Tensor:
    """Returns scales (panels, groups, 64) as (n, k)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])[:n].repeat_interleave(group, 1)[:, :k]
