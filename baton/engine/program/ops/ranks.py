"""Defines the ops that several ranks compute together.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp
from baton.engine.program.ops.experts import MoeGate


class Meet(BaseOp, frozen=True, tag=True):
    """Waits until all ranks have filled their parts ``x``, columns or rows of a register; out = that register,
    whole.
    """

    x: str
    out: str


class Exchange(BaseOp, frozen=True, tag=True):
    """Writes the rank's rows of ``x`` and of a router's ``logits`` among those of all ranks, and waits for the
    others.

    Afterwards ``rows`` and ``routes`` hold the rows of all ranks, in the order of the step.
    """

    x: str
    logits: str
    rows: str
    routes: str


class OwnExperts(BaseOp, frozen=True, tag=True):
    """Runs a rank's own experts, ``first`` … ``first + count - 1``: out = their outputs, at their places among the
    ``chosen`` experts of each row; other places are left to other ranks.

    Behind the weights of own experts lie those of ``spare`` copies of others. ``layer`` is the layer's number among
    those with experts, ``rank`` this rank's number among the ``ranks`` that divide it.
    """

    x: str
    logits: str
    gate_up: str
    down: str
    experts: int
    first: int
    count: int
    chosen: int
    renormalise: bool
    out: str
    gate: MoeGate | None = None
    layer: int = 0
    rank: int = 0
    ranks: int = 1
    spare: int = 0


class MixExperts(BaseOp, frozen=True, tag=True):
    """Sums the outputs ``y`` that all ranks' ``OwnExperts`` of one layer wrote: out = the result of ``Moe``, for
    each row.

    ``gate_up`` identifies the layer.
    """

    y: str
    logits: str
    gate_up: str
    out: str
