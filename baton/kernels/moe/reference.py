"""Computes a layer of experts: the router's best few for each row, SwiGLU in each, their outputs added by weight.

Knows nothing of models (https://arxiv.org/abs/2401.04088). Beside bfloat16 weights, rows and what lies between the
two layers are rounded to bfloat16 too; everything else is in the precision of ``x``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.reference import linear
from baton.kernels.swiglu.reference import swiglu

Matrices = Tensor | Sequence[Tensor | PackedWeight]


def moe(
    x: Tensor, logits: Tensor, gate_up: Matrices, down: Matrices, chosen: int, renormalise: bool = True
) -> Tensor:
    """Mixes experts: x (rows, hidden), logits (rows, experts), gate_up and down as ``native.Experts`` has them ->
    as x.

    Of equal logits the lower expert is chosen; a row with a NaN among its logits is NaN. Packed matrices come as
    one per expert, and round their rows as a dense layer does.
    """
    experts, weights = route(logits.to(x.dtype), chosen, renormalise)
    dtype = down.dtype if isinstance(down, Tensor) else x.dtype
    rounded, out = _rounded(x, dtype), torch.zeros_like(x)
    for rank in range(chosen):
        for expert in experts[:, rank].unique().tolist():
            rows = (experts[:, rank] == expert).nonzero()[:, 0]
            between = _rounded(swiglu(_product(rounded[rows], gate_up[expert])), dtype)
            out[rows] += weights[rows, rank, None] * _product(between, down[expert])
    return out


def _product(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    return linear(x, weight) if isinstance(weight, PackedWeight) else x @ weight.to(x.dtype).T


def route(logits: Tensor, chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Routes rows: (rows, experts) -> the best experts of each row, best first, and their weights, both (rows,
    chosen).
    """
    known = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    experts = known.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    weights = logits.softmax(-1).gather(-1, experts)
    if renormalise:
        weights = known.gather(-1, experts).softmax(-1)
    return experts, weights.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)


def _rounded(x: Tensor, to: torch.dtype) -> Tensor:
    return x.float().bfloat16().to(x.dtype) if to == torch.bfloat16 else x
