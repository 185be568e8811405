"""Computes gated delta nets (https://arxiv.org/abs/2412.06464): a convolution, then a state that tokens correct.

Knows nothing of where states lie or of how rows were projected. All is float32, because a state is summed for ever.

    S' = exp(g) S        u = beta (v - S'ᵀ k)        S = S' + k uᵀ        o = Sᵀ q

for each head, k and q of length 1, q divided by the square root of their size. Stretches of ``STRETCH`` tokens are
solved at once (the paper's 3.3): c being the running sum of g, U = (1 + A)⁻¹ beta (V - exp(c) K S), A below the
diagonal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STRETCH = 64  # tokens that are solved at once, because the triangular system grows with their square
NORM_EPS = 1e-6  # added to the squared length of q and k


def gated_delta(
    mixed: Tensor, beta: Tensor, decay: Tensor, conv: Tensor, past: Tensor, state: Tensor, key_heads: int
) -> Tensor:
    """Advances one sequence by some tokens -> (tokens, value_heads, value_dim); changes ``past`` and ``state``.

    mixed (tokens, channels): q, k and v side by side, heads of k and q ``key_heads`` each; beta and decay (the g
    above) (tokens, value_heads); conv (channels, kernel), past (channels, kernel - 1), state (value_heads, key_dim,
    value_dim).
    """
    value_heads, key_dim, value_dim = state.shape
    rows = F.silu(convolve(mixed, conv, past))
    q, k, v = rows.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), -1)
    q, k = (_unit(x.unflatten(-1, (key_heads, key_dim))) for x in (q, k))
    repeats = value_heads // key_heads
    q, k = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (q * key_dim**-0.5, k))
    values = v.unflatten(-1, (value_heads, value_dim)).transpose(0, 1)
    outs = []
    for at in range(0, len(mixed), STRETCH):
        part = slice(at, at + STRETCH)
        outs.append(_advance(q[:, part], k[:, part], values[:, part], beta.T[:, part], decay.T[:, part], state))
    return torch.cat(outs, 1).transpose(0, 1)


def convolve(rows: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """Convolves each channel over time: rows (tokens, channels) after ``past``, which becomes the last ones."""
    whole = torch.cat((past, rows.T), -1)
    past.copy_(whole[:, whole.shape[1] - past.shape[1] :])
    return F.conv1d(whole[None], weight[:, None], groups=len(weight))[0].T


def _advance(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """One stretch: q, k (heads, tokens, key_dim), v (heads, tokens, value_dim), gates (heads, tokens)."""
    total = decay.cumsum(-1)
    since = total[:, :, None] - total[:, None]
    faded = since.masked_fill(torch.ones_like(since, dtype=torch.bool).triu(1), -torch.inf).exp()
    alike = beta[..., None] * (k @ k.mT) * faded
    grown = total.exp()[..., None]
    wanted = beta[..., None] * (v - grown * (k @ state))
    update = torch.linalg.solve_triangular(alike, wanted, upper=False, unitriangular=True)
    out = grown * (q @ state) + ((q @ k.mT) * faded) @ update
    left = (total[:, -1:] - total).exp()[..., None]
    state.mul_(total[:, -1].exp()[:, None, None]).add_((k * left).mT @ update)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
