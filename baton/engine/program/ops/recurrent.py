"""Defines the ops that advance a sequence's recurrent state.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class GatedDelta(BaseOp, frozen=True, tag=True):
    """Advances each sequence's state of recurrent layer ``layer`` by a gated delta rule; out = what is read from
    it.

    ``mixed`` has q, k, v and z side by side, ``gates`` b and a; with ``grouped`` both lie key head by key head. The
    output is normed head by head by ``norm`` and gated by z. ``conv`` is the weight of a causal convolution over q,
    k and v.
    """

    mixed: str
    gates: str
    layer: int
    conv: str
    a_log: str  # (value_heads,): log of the decay's rate
    dt_bias: str  # (value_heads,): added to a
    norm: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    grouped: bool
    eps: float
    out: str


class StateSpace(BaseOp, frozen=True, tag=True):
    """Advances each sequence's state of recurrent layer ``layer`` by Mamba-2's recurrence; out = what is read from
    it.

    ``mixed`` has a gate, x, B and C of ``groups`` groups and dt side by side. The output, times silu(gate), is
    normed group by group by ``norm``. ``conv`` is the weight of a causal convolution over x, B and C.
    """

    mixed: str
    layer: int
    conv: str
    conv_bias: str | None
    a_log: str  # (heads,): log of the decay's rate
    skip: str  # (heads,): factor on x, which is added to the output
    dt_bias: str  # (heads,): added to dt
    norm: str
    heads: int
    head_dim: int
    groups: int
    size: int  # numbers of B and C per group
    eps: float
    out: str
