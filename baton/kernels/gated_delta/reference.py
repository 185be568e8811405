"""Gated delta nets (https://arxiv.org/abs/2412.06464): a convolution, then a recurrent state that each token
corrects.

Knows nothing of where states lie or of how rows were projected. All is float32, because a state is a sum over the
whole sequence.

    S' = exp(g) S        u = beta (v - S'ᵀ k)        S = S' + k uᵀ        o = Sᵀ q

for each head, with k and q normalized, and q divided by the square root of its size. Stretches of ``STRETCH``
tokens are solved at once (the paper's 3.3): with c the running sum of g, U = (1 + A)⁻¹ beta (V - exp(c) K S), and A
strictly lower triangular.
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
    """Advances sequences by the same number of tokens each; returns (rows, value_heads, value_dim).

    Updates ``past`` and ``state`` in place. Rows are ordered by sequence. mixed (rows, channels): q, k and v side
    by side, q and k of ``key_heads`` heads; beta and decay (the g above) (rows, value_heads); conv (channels,
    kernel), past (sequences, channels, kernel - 1), state (sequences, value_heads, key_dim, value_dim).
    """
    sequences, value_heads, key_dim, value_dim = state.shape
    rows = F.silu(convolve(mixed, conv, past)).unflatten(0, (sequences, -1))
    q, k, v = rows.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), -1)
    q, k = (_unit(x.unflatten(-1, (key_heads, key_dim))) for x in (q, k))
    repeats = value_heads // key_heads
    q, k = (x.repeat_interleave(repeats, 2).transpose(1, 2) for x in (q * key_dim**-0.5, k))
    values = v.unflatten(-1, (value_heads, value_dim)).transpose(1, 2)
    beta, decay = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (beta, decay))
    outs = []
    for at in range(0, rows.shape[1], STRETCH):
        part = slice(at, at + STRETCH)
        gates = beta[:, :, part], decay[:, :, part]
        outs.append(_advance(q[:, :, part], k[:, :, part], values[:, :, part], *gates, state))
    return torch.cat(outs, 2).transpose(1, 2).flatten(0, 1)


def convolve(rows: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """Returns each channel of ``rows`` convolved causally over time, with ``past`` as the rows before each
    sequence's.

    ``past`` is updated to the last rows.
    """
    fresh = rows.unflatten(0, (len(past), -1)).transpose(1, 2)
    whole = torch.cat((past, fresh), -1)
    past.copy_(whole[..., whole.shape[-1] - past.shape[-1] :])
    return F.conv1d(whole, weight[:, None], groups=len(weight)).transpose(1, 2).flatten(0, 1)


def decay_matrix(decay: Tensor) -> Tensor:
    """Returns (…, tokens, tokens): of what token j adds, the share that is left at token i; 0 where j is later.

    decay (…, tokens): logarithms of what each token leaves. Each pair's are added up by themselves, because sums
    from the beginning grow to thousands, and their differences would be only as exact as those.
    """
    tokens = decay.shape[-1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=decay.device).triu(1)
    since = decay[..., None].expand(*decay.shape, tokens).tril(-1).cumsum(-2)
    return since.masked_fill(later, -torch.inf).exp()


def _advance(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Computes one stretch: q, k (…, heads, tokens, key_dim), v (…, tokens, value_dim), gates (…, heads,
    tokens).
    """
    grown, faded = decay.cumsum(-1).exp()[..., None], decay_matrix(decay)
    alike = beta[..., None] * (k @ k.mT) * faded
    wanted = beta[..., None] * (v - grown * (k @ state))
    update = torch.linalg.solve_triangular(alike, wanted, upper=False, unitriangular=True)
    out = grown * (q @ state) + ((q @ k.mT) * faded) @ update
    state.mul_(grown[..., -1:, :]).add_((k * faded[..., -1, :, None]).mT @ update)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
