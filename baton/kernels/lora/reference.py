"""Adds low-rank adapters to a layer's outputs (https://arxiv.org/abs/2106.09685). Knows nothing of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LoraMatrices(NamedTuple):
    """Holds what one adapter has beside some of a layer's outputs, those from ``first`` on.

    ``a`` is (rank, inputs), beside an embedding (tokens, rank); ``b`` is (outputs, rank).
    """

    a: Tensor
    b: Tensor
    scale: float
    first: int = 0
    looked_up: bool = False


class AdaptedRows(NamedTuple):
    """Says which ``rows`` share an adapter, and what it has beside the layer."""

    rows: Tensor
    parts: tuple[LoraMatrices, ...]


def lora(out: Tensor, x: Tensor, groups: Iterable[AdaptedRows]) -> Tensor:
    """Adds scale x B · (A · x) to the rows that have an adapter: ``out`` (rows, outputs), ``x`` (rows, inputs) or,
    where it is looked up, tokens (rows); returns (rows, outputs). Rows of no group are as they were.
    """
    found = out.clone()
    for rows, parts in groups:
        for part in parts:
            found[rows, part.first : part.first + len(part.b)] += delta(x[rows], part).to(out.dtype)
    return found


def delta(x: Tensor, part: LoraMatrices) -> Tensor:
    """Returns scale x B · (A · x), (rows, outputs of the part), in float32, or float64 where ``x`` or ``a`` is."""
    wide = torch.promote_types(torch.promote_types(x.dtype, part.a.dtype), torch.float32)
    shrunk = part.a[x.long()].to(wide) if part.looked_up else F.linear(x.to(wide), part.a.to(wide))
    return F.linear(shrunk * part.scale, part.b.to(wide))
