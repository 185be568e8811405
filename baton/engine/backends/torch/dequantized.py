"""Converts packed weights to what torch's ops take, on a GPU without the engine's kernels: plain tensors, or the
forms of torch's own products where these are chosen.

Knows nothing of checkpoints. Activations are not quantized before plain weights, so results differ from those of
the packed forms by that rounding; they need the memory of the plain dtype.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from baton.engine.backends.torch.product_trials import ProductChooser
from baton.engine.checkpoints.weights import Weights
from baton.engine.program.ops import Linear, LmHead
from baton.engine.program.program import Program
from baton.kernels.linear.packed import PackedWeight, one_of


def for_torch(
    program: Program, weights: Weights, dtype: torch.dtype, device: str, chooser: ProductChooser | None = None
) -> Weights:
    """Returns ``weights`` on ``device``: packed ones as ``chooser`` has them, else dequantized to ``dtype``, the
    experts of a layer concatenated again.
    """
    multiplied = {op.weight for op in program.ops if isinstance(op, Linear | LmHead)}
    experts = {name: op.experts for op in program.experts for name in (op.gate_up, op.down)}
    rows = {weight.name: sum(shape[0] for shape in weight.shapes) for weight in program.weights}
    made: Weights = {}
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            made[name] = weight.to(device)
            continue
        held = chooser.held(weight) if chooser is not None and name in multiplied else None
        if held is not None:
            made[name] = cast(Tensor, held)  # no tensor, but what the runner on torch's ops takes in its place
        else:
            count = experts.get(name, 1)
            made[name] = _rows(weight, count, rows[name] // count, dtype).to(device)
    return made


def _rows(whole: PackedWeight, count: int, n: int, dtype: torch.dtype) -> Tensor:
    """Returns all rows of a matrix, or of all experts one after the other, without the padding of panels."""
    if count == 1:
        return whole.dequantized(dtype)
    return torch.cat([one_of(whole, expert, count, n).dequantized(dtype) for expert in range(count)])
