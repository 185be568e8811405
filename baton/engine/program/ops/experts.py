"""Defines the ops of layers of experts: who is chosen, what they compute, how it is joined.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

import msgspec

from baton.engine.program.ops.base import BaseOp


class MoeGate(msgspec.Struct, frozen=True):
    """Holds what gpt-oss's experts have in SwiGLU's place: biases of both layers, a gain and a limit.

    With gate and up limited to ``limit`` (gate from above alone): gate x sigmoid(alpha x gate) x (up + 1).
    """

    gate_up_bias: str
    down_bias: str
    alpha: float
    limit: float


class Moe(BaseOp, frozen=True, tag=True):
    """Mixes experts: out = the ``chosen`` best of ``experts`` for each row of x, by ``logits``, added by their
    weights.

    ``gate_up`` (experts x 2 inner, hidden): an expert's gate, its up, then the next one's. ``down`` (experts x
    hidden, inner). ``renormalise``: the chosen weights sum to 1. ``gate``: None for SwiGLU without biases.
    """

    x: str
    logits: str
    gate_up: str
    down: str
    experts: int
    chosen: int
    renormalise: bool
    out: str
    gate: MoeGate | None = None


class Route(BaseOp, frozen=True, tag=True):
    """Chooses ``chosen`` of ``experts`` for each row, in its ``kept`` best of ``groups`` groups, by ``scoring``.

    ``bias`` is added to the scores to choose, never to weigh. A group is as good as its ``best`` best experts
    together. ``out``: logits for ``Moe``, -inf where an expert is not chosen. ``factor`` (rows, 1): what the mixed
    rows are multiplied by, ``scale`` and, unless ``renormalise``, the sum of the chosen scores.
    """

    logits: str
    bias: str | None
    scoring: str
    experts: int
    chosen: int
    groups: int
    kept: int
    best: int
    renormalise: bool
    scale: float
    out: str
    factor: str


class Combine(BaseOp, frozen=True, tag=True):
    """Joins routed and shared experts: out = factor x mixed + sigmoid(gate) x shared (None: no factor, no gate)."""

    mixed: str
    factor: str | None
    shared: str
    gate: str | None
    out: str
