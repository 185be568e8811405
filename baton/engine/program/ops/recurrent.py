"""Defines the ops that advance a sequence's recurrent state.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class GatedDelta(BaseOp, frozen=True, tag=True):
    """Advances each sequence's state of ``layer`` by a gated delta rule; out = its reading.

    ``mixed`` has q, k, v and z side by side, ``gates`` b and a; with ``grouped`` both lie key head by key head.
    z gates the reading, normed head by head by ``norm``.
    """

    mixed: str
    gates: str
    layer: int
    conv: str
    a_log: str
    dt_bias: str
    norm: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    grouped: bool
    eps: float
    out: str


class StateSpace(BaseOp, frozen=True, tag=True):
    """Advances each sequence's state of ``layer`` by Mamba-2's recurrence; out = what it reads.

    ``mixed`` has a gate, x, B and C of ``groups`` groups and dt side by side. What is read, times silu(gate), is
    normed group by group by ``norm``.
    """

    mixed: str
    layer: int
    conv: str
    conv_bias: str | None
    a_log: str
    skip: str
    dt_bias: str
    norm: str
    heads: int
    head_dim: int
    groups: int
    size: int
    eps: float
    out: str
