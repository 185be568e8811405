"""Makes the activation gate of a layer of experts of its op and weights. Knows nothing of rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from baton.engine.program.ops import Moe
from baton.kernels.moe.reference import ExpertGate


def gate_of(op: Moe, weights: Mapping[str, Tensor]) -> ExpertGate | None:
    """Returns the activation gate of a layer of experts that has biases, with their values; None for SwiGLU."""
    if op.gate is None:
        return None
    gate_up, down = (weights[name].float() for name in (op.gate.gate_up_bias, op.gate.down_bias))
    return ExpertGate(gate_up, down, op.gate.alpha, op.gate.limit)
