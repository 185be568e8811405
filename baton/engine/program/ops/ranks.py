"""Defines the ops that several ranks compute together.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp
from baton.engine.program.ops.experts import MoeGate


class AllGather(BaseOp, frozen=True, tag=True):
    """Puts the ranks' columns of ``x`` side by side: out = the columns of rank 0, then those of rank 1, …"""

    x: str
    out: str


class AllReduce(BaseOp, frozen=True, tag=True):
    """Adds the ranks' parts of ``x`` up, of which one at most is not zero: out = their sum, with its bits."""

    x: str
    out: str


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
