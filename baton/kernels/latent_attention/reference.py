"""Multi-head latent attention, over compressed keys and values (https://arxiv.org/abs/2405.04434, 2.1).

Knows nothing of pages' owners or of windows. The cache holds one row per token for all heads: ``rank`` normed
numbers, from which each head's key and value are made, then ``rotary`` rotated ones that end each head's key. The
projections are absorbed: queries are projected to the latent space, and only results are expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.rms_norm.reference import normed
from baton.kernels.rope_append.reference import rotate


def latent_rows(latent: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    """Returns the rows to cache for some tokens: ``latent`` (rows, rank + rotary) normed, its last ``rotary``
    rotated.
    """
    rank = norm.shape[0]
    key = rotate_heads(latent[:, None, rank:], cos, sin, paired)[:, 0]
    return torch.cat((normed(latent[:, :rank], norm, eps), key), -1)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    """Returns x (rows, heads, rotary) rotated; with ``paired`` neighbours are pairs, and the results are halves."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1) if paired else x, cos, sin)


def latent_attention(q: Tensor, kept: Tensor, start: int, expand: Tensor, rank: int, scale: float) -> Tensor:
    """Returns attention outputs (queries, heads, value) for rows of one sequence at positions ``start``, ``start +
    1``, …

    q (queries, heads, plain + rotary), its end rotated; kept (tokens, rank + rotary), of all tokens up to the last
    query; expand (heads, plain + value, rank). Scores and softmax are float32.
    """
    rotary = kept.shape[1] - rank
    plain = q.shape[2] - rotary
    keys, wide = expand[:, :plain].float(), q.float()
    absorbed = torch.cat((torch.einsum("qhp,hpr->qhr", wide[..., :plain], keys), wide[..., plain:]), -1)
    tokens = kept.float()
    scores = torch.einsum("qhr,tr->hqt", absorbed, tokens) * scale
    asked = torch.arange(start, start + len(q))[:, None]
    hidden = torch.arange(len(kept))[None] > asked
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqt,tr->hqr", weights, tokens[:, :rank])
    return torch.einsum("hqr,hvr->qhv", mixed, expand[:, plain:].float()).to(q.dtype)
