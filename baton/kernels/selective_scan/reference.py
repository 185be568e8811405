"""Mamba's selective scan (https://arxiv.org/abs/2312.00752), and the convolution before it.

Knows nothing of where states lie or of how rows were projected. All is float32, because a state is a sum over the
whole sequence.

    S = exp(dt A) S + dt B x        y = S C + D x        for each channel; A is (channels, size), B and C are shared

Tokens are taken one after the other, so that a sequence has the same bits however it is cut into steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, fade: Tensor, skip: Tensor, state: Tensor
) -> Tensor:
    """Advances sequences by the same number of tokens each; returns (rows, channels).

    Updates ``state`` (sequences, channels, size) in place. Rows are ordered by sequence. x and dt (rows, channels),
    dt before its softplus; b and c (rows, size); fade (channels, size), the A above; skip (channels,), the D.
    """
    count = len(state)
    fed, steps, written, read = (each.unflatten(0, (count, -1)) for each in (x, dt, b, c))
    outs = []
    for at in range(fed.shape[1]):
        step = F.softplus(steps[:, at])[..., None]
        state.mul_((step * fade).exp()).add_(step * fed[:, at, :, None] * written[:, at, None])
        outs.append((state * read[:, at, None]).sum(-1) + skip * fed[:, at])
    return torch.stack(outs, 1).flatten(0, 1)


def convolve_by_taps(rows: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """Returns each channel of ``rows`` convolved causally over time, added up tap by tap.

    ``weight`` is (channels, taps). ``past`` (sequences, channels, taps - 1) are the rows before each sequence's,
    and is updated to the last ones.
    """
    fresh = rows.unflatten(0, (len(past), -1))
    whole, tokens = torch.cat((past.transpose(1, 2), fresh), 1), fresh.shape[1]
    past.copy_(whole[:, whole.shape[1] - past.shape[-1] :].transpose(1, 2))
    found = torch.zeros_like(fresh)
    for tap in range(weight.shape[1]):
        found += whole[:, tap : tap + tokens] * weight[:, tap]
    return found.flatten(0, 1)
