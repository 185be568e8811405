"""Attention of sequences that share a prefix: over the prefix for all queries at once, then over each one's own
keys.

Knows nothing of pages. The two parts of a row are merged by their log-sum-exp, the prefix first
(https://arxiv.org/abs/2402.05099); the result is that of plain attention over all keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cascade_attention(
    q: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    queries: Sequence[int],
    scale: float,
) -> Tensor:
    """Returns the attention output (rows, heads, head_dim) for q of that shape, with ``queries`` rows of each
    sequence.

    ``prefix`` is K and V (tokens, kv_heads, head_dim) that all rows see; ``own[i]`` are those that follow it in
    sequence i, whose last query sees all of them, the one before all but one, and so on.
    """
    group = q.shape[1] // prefix[0].shape[1]
    shared = _part(q, *prefix, torch.zeros(len(q), len(prefix[0]), dtype=torch.bool), group, scale)
    found, first = [], 0
    for (keys, values), count in zip(own, queries, strict=True):
        rows = slice(first, first + count)
        hidden = torch.arange(len(keys)) > torch.arange(len(keys) - count, len(keys))[:, None]
        part = _part(q[rows], keys, values, hidden, group, scale)
        found.append(_merged((shared[0][rows], shared[1][rows]), part))
        first += count
    return torch.cat(found)


def _part(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, group: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the attention output of each row over ``keys``, and its log-sum-exp: (rows, heads, head_dim), (rows,
    heads).
    """
    scores = torch.einsum("qhd,khd->qhk", q, keys.repeat_interleave(group, 1)) * scale
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    mass = scores.logsumexp(-1)
    weights = (scores - mass[..., None]).exp().nan_to_num() if len(keys) else scores
    return torch.einsum("qhk,khd->qhd", weights, values.repeat_interleave(group, 1)), mass


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    mass = torch.logaddexp(a[1], b[1])
    shares = ((part[1] - mass).exp()[..., None] * part[0] for part in (a, b))
    return torch.stack(list(shares)).sum(0)
