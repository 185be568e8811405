"""Chooses experts within groups, by softmax or sigmoid scores, with a bias that only affects the choice.

Knows nothing of experts. It is the routing of DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3
(https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    logits: Tensor,
    bias: Tensor | None,
    scoring: str,
    chosen: int,
    groups: int,
    kept: int,
    best: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns logits (rows, experts) that are -inf for experts not chosen, and factors (rows, 1).

    A softmax over the returned logits gives the relative weights of the chosen experts; times the factor it gives
    their weights. ``scoring`` is "softmax" or "sigmoid"; for the other parameters see ``program.ops.Route``.
    """
    wide = logits.float()
    scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(-1)
    ranked = scores if bias is None else scores + bias.float()
    if groups > 1:
        ranked = _in_best_groups(ranked, groups, kept, best)
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    weights = scores.gather(-1, experts)
    found = torch.full_like(wide, -torch.inf).scatter_(-1, experts, weights.log())
    total = torch.ones_like(weights[:, :1]) if renormalise else weights.sum(-1, keepdim=True)
    return found.to(logits.dtype), (total * scale).to(logits.dtype)


def _in_best_groups(ranked: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """Returns ``ranked`` with -inf outside of each row's ``kept`` best groups of neighbours."""
    grouped = ranked.unflatten(-1, (groups, -1))
    merit = grouped.topk(best, dim=-1).values.sum(-1)
    keep = torch.zeros_like(merit, dtype=torch.bool).scatter_(-1, merit.topk(kept, dim=-1).indices, True)
    return grouped.masked_fill(~keep[..., None], -torch.inf).flatten(-2)
