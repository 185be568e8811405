"""Rows before they are rotated: neighbours of a head put into its halves, queries scaled by their positions.

Knows nothing of pages.
"""

from __future__ import annotations

import torch
from torch import Tensor


def halve_heads(x: Tensor, heads: int, width: int, paired: int) -> Tensor:
    """Returns x (rows, total) with the leading ``paired`` numbers of each of its first ``heads`` heads of ``width``
    reordered: the even ones, then the odd ones.
    """
    order = torch.cat((torch.arange(0, paired, 2), torch.arange(1, paired, 2), torch.arange(paired, width)))
    moved = (torch.arange(heads)[:, None] * width + order).flatten()
    return x[:, torch.cat((moved, torch.arange(heads * width, x.shape[1])))]


def temper_queries(x: Tensor, queries: int, start: int, scale: float, floor: float, shift: int) -> None:
    """Multiplies the first ``queries`` numbers of each row of ``x`` in place by 1 + scale x ln(1 + steps).

    Steps are the whole part of (position + shift) / floor; rows are at positions from ``start`` on.
    """
    at = torch.arange(start, start + len(x), dtype=torch.float32) + shift
    x[:, :queries] *= (1.0 + scale * torch.log1p(torch.floor(at / floor)))[:, None].to(x.dtype)
