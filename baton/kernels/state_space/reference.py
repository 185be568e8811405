"""Computes Mamba-2's state space layers (https://arxiv.org/abs/2405.21060): a convolution, then a state that fades.

Knows nothing of where states lie or of how rows were projected. All is float32, because a state is summed for ever.

    S = exp(dt A) S + dt x Bᵀ        y = S C + D x        for each head; B and C are shared by the heads of a group

Stretches of ``STRETCH`` tokens are computed at once (the paper's section 6).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.gated_delta.reference import convolve

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
    """Advances one sequence by some tokens -> (tokens, heads, head_dim); changes ``past`` and ``state``.

    mixed (tokens, channels): x of all heads, then B and C of all ``groups``; dt (tokens, heads), its bias and
    softplus applied; fade (heads,), the A above; skip (heads,), the D; conv (channels, kernel), past (channels,
    kernel - 1), state (heads, head_dim, size).
    """
    heads, head_dim, size = state.shape
    rows = convolve(mixed, conv, past)
    rows = F.silu(rows if conv_bias is None else rows + conv_bias)
    x, b, c = rows.split((heads * head_dim, groups * size, groups * size), -1)
    values = x.unflatten(-1, (heads, head_dim)).transpose(0, 1)
    b, c = (
        each.unflatten(-1, (groups, size)).repeat_interleave(heads // groups, 1).transpose(0, 1) for each in (b, c)
    )
    steps, outs = dt.T, []
    for at in range(0, len(mixed), STRETCH):
        part = slice(at, at + STRETCH)
        outs.append(_advance(values[:, part], b[:, part], c[:, part], steps[:, part], fade, state))
    return (torch.cat(outs, 1) + skip[:, None, None] * values).transpose(0, 1)


def _advance(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, fade: Tensor, state: Tensor) -> Tensor:
    """One stretch: x (heads, tokens, head_dim), b and c (heads, tokens, size), dt (heads, tokens)."""
    total = (dt * fade[:, None]).cumsum(-1)
    since = total[:, :, None] - total[:, None]
    faded = since.masked_fill(torch.ones_like(since, dtype=torch.bool).triu(1), -torch.inf).exp()
    fed = dt[..., None] * x
    out = ((c @ b.mT) * faded) @ fed + total.exp()[..., None] * (c @ state.mT)
    left = (total[:, -1:] - total).exp()[..., None]
    state.mul_(total[:, -1].exp()[:, None, None]).add_((fed * left).mT @ b)
    return out
