"""Adds low-rank adapters to a layer's outputs (https://arxiv.org/abs/2106.09685). Knows nothing of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LoraMatrices(NamedTuple):
    """The matrices of one adapter for the outputs of a layer from ``first`` on."""

    a: Tensor  # (rank, inputs); for an embedding (tokens, rank)
    b: Tensor  # (outputs, rank)
    scale: float
    first: int = 0
    looked_up: bool = False  # whether the layer is an embedding, so that tokens index ``a``


class AdaptedRows(NamedTuple):
    """The indices ``rows`` that share an adapter, and its matrices for the layer."""

    rows: Tensor
    parts: tuple[LoraMatrices, ...]


def lora(out: Tensor, x: Tensor, groups: Iterable[AdaptedRows]) -> Tensor:
    """Returns ``out`` (rows, outputs) with scale x B · (A · x) added to the rows that have an adapter.

    ``x`` is (rows, inputs), or token ids (rows,) if ``looked_up``. Rows in no group stay as they were.
    """
    found = out.clone()
    for rows, parts in groups:
        for part in parts:
            found[rows, part.first : part.first + len(part.b)] += delta(x[rows], part).to(out.dtype)
    return found


def delta(x: Tensor, part: LoraMatrices) -> Tensor:
    """Returns scale x B · (A · x), (rows, outputs of the part), in float32, or in float64 if ``x`` or ``a`` is."""
    wide = torch.promote_types(torch.promote_types(x.dtype, part.a.dtype), torch.float32)
    shrunk = part.a[x.long()].to(wide) if part.looked_up else F.linear(x.to(wide), part.a.to(wide))
    return F.linear(shrunk * part.scale, part.b.to(wide))
