"""Defines the ops that several ranks compute together.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp
from baton.engine.program.ops.experts import MoeGate


class Meet(BaseOp, frozen=True, tag=True):
    """Waits until all ranks have filled ``x``, their columns or rows of a register: out = that register, whole."""

    x: str
    out: str


class Exchange(BaseOp, frozen=True, tag=True):
    """Puts own rows of ``x`` and of a router's ``logits`` among those of all ranks, and waits for theirs.

    ``rows`` and ``routes`` have every rank's rows then, in the order of the step.
    """

    x: str
    logits: str
    rows: str
    routes: str


class OwnExperts(BaseOp, frozen=True, tag=True):
    """Runs a rank's own experts, ``first`` … ``first + count - 1`` of all: out = their outputs, at the places of
    the ``chosen`` experts of each row that they are; what other ranks' experts come to is left to them.
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


class MixExperts(BaseOp, frozen=True, tag=True):
    """Adds up what all ranks' ``OwnExperts`` of one layer wrote to ``y``: out = what ``Moe`` comes to, for each
    row.

    ``gate_up`` names the layer.
    """

    y: str
    logits: str
    gate_up: str
    out: str
