"""Several residual streams of which a layer computes one: the others predicted before it and corrected behind it
(AltUp, https://arxiv.org/abs/2301.13310, as Gemma 3n has it).

Knows nothing of layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.rms_norm.reference import normed

LEAST_SQUARE = 1e-5  # a stream's mean square counts as this where it is less


def router_modes(x: Tensor, norm: Tensor, router: Tensor, eps: float) -> Tensor:
    """Returns tanh(router · normed x / columns), (rows, streams), of x (rows, columns) and ``router`` (streams,
    columns).
    """
    return torch.tanh((normed(x, norm, eps) / x.shape[1]) @ router.T)


def predict_streams(x: Tensor, streams: Tensor, modes: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x (rows, columns) and ``streams`` (rows, (n - 1) x columns) with a mix of all n added to each.

    ``modes`` (rows, n) come from ``router_modes``; ``mix`` (n x n, n) turns them into the factors: that of stream j
    in what is added to stream k is row n x k + j.
    """
    every = torch.cat((x, streams), 1).unflatten(1, (-1, x.shape[1]))
    factors = (modes @ mix.T).unflatten(1, (every.shape[1], -1))
    found = every + factors @ every
    return found[:, 0], found[:, 1:].flatten(1)


def correct_streams(x: Tensor, streams: Tensor, y: Tensor, modes: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x (rows, columns) and ``streams`` (rows, (n - 1) x columns), to each of which y - x is added times a
    factor.

    Stream k's factor is 1 + row k of ``mix`` (n, n) · ``modes``.
    """
    every = torch.cat((x, streams), 1).unflatten(1, (-1, x.shape[1]))
    found = every + (1.0 + modes @ mix.T)[..., None] * (y - x)[:, None]
    return found[:, 0], found[:, 1:].flatten(1)


def match_size(x: Tensor, streams: Tensor) -> Tensor:
    """Returns ``streams`` (rows, n x columns), each scaled to the root mean square of x (rows, columns)."""
    each = streams.unflatten(1, (-1, x.shape[1]))
    size = x.square().mean(-1).sqrt()[:, None, None]
    found = each * size / each.square().mean(-1, keepdim=True).clamp_min(LEAST_SQUARE).sqrt()
    return found.flatten(1)


def add_to_each(streams: Tensor, delta: Tensor) -> Tensor:
    """Returns ``streams`` (rows, n x columns) with ``delta`` (rows, columns) added to each."""
    return streams + delta.repeat(1, streams.shape[1] // delta.shape[1])
