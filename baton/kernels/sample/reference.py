"""Draws tokens from logits, with a uniform random number for each row.

Knows nothing of seeds: each row brings its own number. The draw is an inverse transform in token order: the first
token whose cumulative probability exceeds ``uniform``. A row's draw depends only on its logits and its number, and
a rounding difference in the logits changes it only if the number is within that difference of a boundary.
"""

from __future__ import annotations

import torch
from torch import Tensor

CANDIDATES = 256  # likeliest tokens that top_p looks at first, because they mostly hold the mass


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Returns token ids (rows,) int64 drawn from logits (rows, vocab) float32; the other arguments are (rows,).

    Filters apply in the order temperature, top_k (0 keeps all), top_p (1 keeps all), min_p (0 keeps all); ties at a
    threshold are kept.
    """
    return by_inverse(_kept(logits, temperature, top_k, top_p, min_p), uniform)


def by_inverse(probs: Tensor, uniform: Tensor) -> Tensor:
    """Returns token ids (rows,) int64 by inverse transform; ``probs`` (rows, vocab) needn't sum to 1."""
    reached = probs.double().cumsum(-1)
    target = uniform.double()[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, target, right=True).squeeze(1).clamp_(max=probs.shape[1] - 1)


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Returns the probabilities (rows, vocab) by which ``sample`` draws; each row's sum is 1."""
    probs = _kept(logits, temperature, top_k, top_p, min_p)
    return probs / probs.sum(-1, keepdim=True)


def _kept(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    probs = torch.softmax(logits / temperature[:, None], -1)
    probs = _keep_top_k(probs, top_k)
    return keep_min_p(_keep_top_p(probs, top_p), min_p)


def keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Returns ``probs`` (rows, vocab) without those below ``min_p`` (rows,) times their row's largest."""
    return probs.masked_fill(probs < min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)


def _keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    if not bool(top_k.any()):
        return probs
    most = int(top_k.max().clamp(max=probs.shape[1]))
    best = probs.topk(most, -1).values
    last = best.gather(1, (top_k.clamp(1, most) - 1)[:, None])
    kept = probs.masked_fill(probs < last, 0.0)
    return torch.where((top_k > 0)[:, None], kept, probs)


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    asked = top_p < 1
    if not bool(asked.any()):
        return probs
    mass = top_p * probs.sum(-1)
    falling = _falling(probs, mass, asked)
    inside = falling.cumsum(-1) - falling < mass[:, None]
    last = falling.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
    kept = probs.masked_fill(probs < last, 0.0)
    return torch.where(asked[:, None], kept, probs)


def _falling(probs: Tensor, mass: Tensor, asked: Tensor) -> Tensor:
    """Returns the largest probabilities in falling order: the first few hundred if they hold the mass, else all."""
    few = probs.topk(min(CANDIDATES, probs.shape[1]), -1).values
    enough = few.sum(-1) > mass
    return few if bool(enough[asked].all()) else probs.sort(-1, descending=True).values
