"""Mamba-2's state space layers (https://arxiv.org/abs/2405.21060): a convolution, then a recurrent state that
decays.

Knows nothing of where states lie or of how rows were projected. All is float32, because a state is a sum over the
whole sequence.

    S = exp(dt A) S + dt x Bᵀ        y = S C + D x        for each head; B and C are shared by the heads of a group

Stretches of ``STRETCH`` tokens are computed at once (the paper's section 6).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.gated_delta.reference import convolve, decay_matrix

STRETCH = 64  # tokens that are computed at once, because what lies between them grows with their square


def state_space(
    mixed: Tensor,
    dt: Tensor,
    fade: Tensor,
    skip: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    past: Tensor,
    state: Tensor,
    groups: int,
) -> Tensor:
    """Advances sequences by the same number of tokens each; returns (rows, heads, head_dim).

    Updates ``past`` and ``state`` in place. Rows are ordered by sequence. mixed (rows, channels): x of all heads,
    then B and C of all ``groups``; dt (rows, heads), its bias and softplus applied; fade (heads,), the A above;
    skip (heads,), the D; conv (channels, kernel), past (sequences, channels, kernel - 1), state (sequences, heads,
    head_dim, size).
    """
    sequences, heads, head_dim, size = state.shape
    rows = convolve(mixed, conv, past)
    rows = F.silu(rows if conv_bias is None else rows + conv_bias).unflatten(0, (sequences, -1))
    x, b, c = rows.split((heads * head_dim, groups * size, groups * size), -1)
    values = x.unflatten(-1, (heads, head_dim)).transpose(1, 2)
    b, c = (_by_head(each.unflatten(-1, (groups, size)), heads) for each in (b, c))
    steps, outs = dt.unflatten(0, (sequences, -1)).transpose(1, 2), []
    for at in range(0, rows.shape[1], STRETCH):
        part = slice(at, at + STRETCH)
        fed = values[:, :, part], b[:, :, part], c[:, :, part]
        outs.append(_advance(*fed, steps[:, :, part], fade, state))
    return (torch.cat(outs, 2) + skip[:, None, None] * values).transpose(1, 2).flatten(0, 1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Returns x (sequences, tokens, groups, size) as (sequences, heads, tokens, size)."""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


def _advance(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, fade: Tensor, state: Tensor) -> Tensor:
    """Computes one stretch: x (…, heads, tokens, head_dim), b and c (…, tokens, size), dt (…, heads, tokens)."""
    decay = dt * fade[:, None]
    grown, faded = decay.cumsum(-1).exp()[..., None], decay_matrix(decay)
    fed = dt[..., None] * x
    out = ((c @ b.mT) * faded) @ fed + grown * (c @ state.mT)
    state.mul_(grown[..., -1:, :]).add_((fed * faded[..., -1, :, None]).mT @ b)
    return out
