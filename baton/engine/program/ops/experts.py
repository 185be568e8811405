"""Defines the ops of mixture-of-experts layers: routing, the experts, and the sum of their outputs.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

import msgspec

from baton.engine.program.ops.base import BaseOp


class MoeGate(msgspec.Struct, frozen=True):
    """Describes the gated activation of gpt-oss's experts, in place of SwiGLU: biases of both matrices, ``alpha``
    and ``limit``.

    With gate (from above) and up (from both sides) clamped to ``limit``: gate x sigmoid(alpha x gate) x (up + 1).
    """

    gate_up_bias: str
    down_bias: str
    alpha: float
    limit: float


class Moe(BaseOp, frozen=True, tag=True):
    """Runs experts: out = the sum of the outputs of the ``chosen`` best of ``experts`` for each row of x, weighted
    by the softmax of ``logits``.

    ``gate_up`` (experts x 2 inner, hidden) has an expert's gate, its up, then the next expert's; ``down`` is
    (experts x hidden, inner). ``renormalise``: the chosen weights sum to 1. ``gate``: None for SwiGLU without
    biases.
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
    """Chooses ``chosen`` of ``experts`` for each row from its ``kept`` best of ``groups`` groups, by ``scoring``
    ("softmax" or "sigmoid").

    ``bias`` is added to the scores for the choice, not for the weights. A group's score is the sum of its ``best``
    best experts' scores. ``out`` are logits for ``Moe``, -inf for experts that aren't chosen. ``factor`` (rows, 1)
    multiplies the mixed rows: it is ``scale`` times, unless ``renormalise``, the sum of the chosen scores.
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


class RouteTwo(BaseOp, frozen=True, tag=True):
    """Chooses two experts for each row as SparseMixer does (https://arxiv.org/abs/2409.12136): each has the weight
    of a softmax over the experts whose logits are near its own.

    ``out`` are logits for ``Moe``, -inf for experts that aren't chosen; ``factor`` (rows, 1), the sum of the two
    weights, multiplies the mixed rows. Experts are near within 2 x ``jitter`` of the larger of both logits' sizes.
    """

    logits: str
    experts: int
    jitter: float
    out: str
    factor: str


class Combine(BaseOp, frozen=True, tag=True):
    """Adds routed and shared experts: out = factor x mixed + sigmoid(gate) x shared (None: without factor, without
    gate).
    """

    mixed: str
    factor: str | None
    shared: str
    gate: str | None
    out: str
