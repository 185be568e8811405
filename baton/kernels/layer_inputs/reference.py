"""Inputs that each layer has of its own beside the residual stream, and gates of which few are kept (Gemma 3n).

Knows nothing of layers' weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.rms_norm.reference import normed


def layer_inputs(x: Tensor, tokens: Tensor, table: Tensor, norm: Tensor, eps: float, scale: float) -> Tensor:
    """Returns (normed x + scale x table[token]) / sqrt(2), (rows, layers x width); x has the same shape.

    Columns are normed in groups of ``norm``'s width. A token without a row in ``table`` reads the first.
    """
    known = torch.where(tokens < len(table), tokens, 0)
    found = normed(x.unflatten(1, (-1, len(norm))), norm, eps).flatten(1)
    return (found + table[known].to(x.dtype) * scale) * 2**-0.5


def gate_inputs(x: Tensor, inputs: Tensor, first: int) -> Tensor:
    """Returns gelu(x) x columns ``first`` and up of ``inputs``, (rows, columns of x), with gelu's tanh
    approximation.
    """
    return F.gelu(x, approximate="tanh") * inputs[:, first : first + x.shape[1]]


def sparsen(x: Tensor, deviations: float) -> Tensor:
    """Returns x (rows, 2 x inner) with ``deviations`` standard deviations and the mean of a row's first half taken
    from that half, and what is below 0 there set to 0.
    """
    gate, up = x.chunk(2, -1)
    cut = gate.mean(-1, keepdim=True) + deviations * gate.std(-1, keepdim=True, unbiased=False)
    return torch.cat((F.relu(gate - cut), up), -1)
