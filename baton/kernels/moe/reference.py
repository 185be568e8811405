"""A layer of experts: each row's best few by the router, SwiGLU in each, and the weighted sum of their outputs.

Knows nothing of models. See https://arxiv.org/abs/2401.04088. With bfloat16 weights, rows and the values between
the two layers are rounded to bfloat16 too; everything else has the precision of ``x``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.reference import HeldWeight, linear
from baton.kernels.lora.reference import AdaptedRows, LoraMatrices, delta
from baton.kernels.swiglu.reference import swiglu

Matrices = Tensor | Sequence[Tensor | PackedWeight | HeldWeight]


class ExpertGate(NamedTuple):
    """gpt-oss's gate in place of SwiGLU, with the biases of both layers: (experts x 2 x inner,), (experts x
    hidden,).
    """

    gate_up_bias: Tensor
    down_bias: Tensor
    alpha: float
    limit: float

    def between(self, expert: int, experts: int, both: Tensor) -> Tensor:
        """Returns the input of the second layer (rows, inner) from the output of the first, ``both`` (rows, 2 x
        inner).
        """
        gate, up = (both + self.gate_up_bias.view(experts, -1)[expert].to(both.dtype)).chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)

    def after(self, expert: int, experts: int, y: Tensor) -> Tensor:
        """Returns the second layer's output ``y`` (rows, hidden) with the bias of expert ``expert`` added."""
        return y + self.down_bias.view(experts, -1)[expert].to(y.dtype)


class ExpertAdapters(NamedTuple):
    """The adapters of rows beside the experts' two layers; a matrix's ``first`` counts the outputs of all experts,
    stacked as in ``Experts``.
    """

    gate_up: Sequence[AdaptedRows] = ()
    down: Sequence[AdaptedRows] = ()


NO_ADAPTERS = ExpertAdapters()


def moe(
    x: Tensor, logits: Tensor, gate_up: Matrices, down: Matrices, chosen: int, renormalise: bool = True,
    gate: ExpertGate | None = None, adapters: ExpertAdapters = NO_ADAPTERS,
) -> Tensor:  # fmt: skip
    """Returns the weighted sum of the chosen experts' outputs, in the shape and dtype of x (rows, hidden).

    Logits are (rows, experts), gate_up and down as in ``native.Experts``, or one packed matrix per expert, which
    rounds its rows as a dense layer does. Of equal logits the lower expert is chosen; a row with a NaN logit is
    NaN. ``gate`` replaces SwiGLU. ``adapters`` are added to each layer's products, before biases and
    activation.
    """
    of = logits.shape[-1]
    experts, weights = route(logits.to(x.dtype), chosen, renormalise)
    dtype = down.dtype if isinstance(down, Tensor) else x.dtype
    rounded, out = _rounded(x, dtype), torch.zeros_like(x)
    for rank in range(chosen):
        for expert in experts[:, rank].unique().tolist():
            rows = (experts[:, rank] == expert).nonzero()[:, 0]
            both = _product(rounded[rows], gate_up[expert])
            _adapt(both, rounded[rows], rows, expert, adapters.gate_up)
            between = _rounded(swiglu(both) if gate is None else gate.between(expert, of, both), dtype)
            y = _product(between, down[expert])
            _adapt(y, between, rows, expert, adapters.down)
            out[rows] += weights[rows, rank, None] * (y if gate is None else gate.after(expert, of, y))
    return out


def _product(x: Tensor, weight: Tensor | PackedWeight | HeldWeight) -> Tensor:
    """Returns x · weightᵀ, (rows, outputs); a BLAS gets a multiple of four rows, see ``linear/reference.py``."""
    full = F.pad(x, (0, 0, 0, -len(x) % 4))
    found = full @ weight.to(x.dtype).T if isinstance(weight, Tensor) else linear(full, weight)
    return found[: len(x)]


def _adapt(y: Tensor, x: Tensor, rows: Tensor, expert: int, groups: Sequence[AdaptedRows]) -> None:
    """Adds to an expert's outputs ``y`` of ``rows``, whose inputs are ``x``, what the rows' adapters have beside
    it.
    """
    first = expert * y.shape[1]
    for group in groups:
        own = torch.isin(rows, group.rows)
        for part in _beside(group.parts, first, first + y.shape[1]):
            at = part.first - first
            y[own, at : at + len(part.b)] += delta(x[own], part).to(y.dtype)


def _beside(parts: Iterable[LoraMatrices], first: int, end: int) -> list[LoraMatrices]:
    return [part for part in parts if first <= part.first < end]


def route(logits: Tensor, chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Returns the best experts of each row of logits (rows, experts), best first, and their weights, both (rows,
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
