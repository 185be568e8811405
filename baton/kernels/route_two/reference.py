"""Chooses two experts for each row as Phi-3.5-MoE does, by SparseMixer (https://arxiv.org/abs/2409.12136).

Knows nothing of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route_two(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Returns logits (rows, experts) that are -inf for experts not chosen, and factors (rows, 1).

    A softmax over the returned logits, times the factor, gives the weights of the two chosen experts. Each weight
    is that of a softmax over the experts whose distance from the best logit, divided by the larger of both sizes,
    is at most 2 x ``jitter``; the second expert is the best without the first one.
    """
    wide = logits.float()
    first, first_weight = _best(wide, wide, jitter)
    second, second_weight = _best(wide, wide.scatter(-1, first, -torch.inf), jitter)
    experts, weights = torch.cat((first, second), -1), torch.cat((first_weight, second_weight), -1)
    found = torch.full_like(wide, -torch.inf).scatter_(-1, experts, weights.log())
    return found.to(logits.dtype), weights.sum(-1, keepdim=True).to(logits.dtype)


def _best(logits: Tensor, left: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Returns the best expert of ``left``, logits of which some are -inf, and its weight, each (rows, 1)."""
    most, at = left.max(-1, keepdim=True)
    far = (most - logits) / logits.abs().clamp(min=most) > 2 * jitter
    return at, left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, at)
