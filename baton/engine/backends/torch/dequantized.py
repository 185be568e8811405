"""Converts packed weights to plain tensors on a device, for torch's ops on a GPU without the engine's kernels.

Knows nothing of checkpoints. Activations are not quantized before such weights, so results differ from those of
the packed forms by that rounding; they need the memory of the plain dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.checkpoints.weights import Weights
from baton.engine.program.program import Program
from baton.kernels.linear.packed import PackedWeight, one_of


def for_torch(program: Program, weights: Weights, dtype: torch.dtype, device: str) -> Weights:
    """Returns ``weights`` as tensors on ``device``: packed ones dequantized to ``dtype``, the experts of a layer
    concatenated again.
    """
    experts = {name: op.experts for op in program.experts for name in (op.gate_up, op.down)}
    rows = {weight.name: sum(shape[0] for shape in weight.shapes) for weight in program.weights}
    made: Weights = {}
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            made[name] = weight.to(device)
        else:
            count = experts.get(name, 1)
            made[name] = _rows(weight, count, rows[name] // count, dtype).to(device)
    return made


def _rows(whole: PackedWeight, count: int, n: int, dtype: torch.dtype) -> Tensor:
    """Returns all rows of a matrix, or of all experts one after the other, without the padding of panels."""
    if count == 1:
        return whole.dequantized(dtype)
    return torch.cat([one_of(whole, expert, count, n).dequantized(dtype) for expert in range(count)])
