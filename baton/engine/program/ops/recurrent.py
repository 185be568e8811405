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
    k and v. A rank's op has key heads from ``first_key_head`` on, of ``all_key_heads``; 0 means that it has all.
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
    first_key_head: int = 0
    all_key_heads: int = 0


class StateSpace(BaseOp, frozen=True, tag=True):
    """Advances each sequence's state of recurrent layer ``layer`` by Mamba-2's recurrence; out = what is read from
    it.

    ``mixed`` has a gate, x, B and C of ``groups`` groups and dt side by side. The output, times silu(gate), is
    normed group by group by ``norm``, empty for none. ``conv`` is the weight of a causal convolution over x, B and
    C. A rank's op has heads from ``first_head`` on, of ``all_heads``, and groups likewise; 0 means that it has all.
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
    first_head: int = 0
    all_heads: int = 0
    first_group: int = 0
    all_groups: int = 0


class Convolve(BaseOp, frozen=True, tag=True):
    """Convolves the first columns of ``x`` over time, channel by channel, and applies silu: out (rows, ``width``).

    ``conv`` is the weight (width, 1, taps) of a causal convolution of recurrent layer ``layer``, whose last inputs
    are a part of the sequence's state. A rank's op has channels from ``first_channel`` on.
    """

    x: str
    layer: int
    conv: str
    conv_bias: str | None
    width: int
    out: str
    first_channel: int = 0


class Divide(BaseOp, frozen=True, tag=True):
    """Copies the columns of ``x`` to registers: the first ``widths[0]`` to ``outs[0]``, and so on."""

    x: str
    widths: tuple[int, ...]
    outs: tuple[str, ...]


class SelectiveScan(BaseOp, frozen=True, tag=True):
    """Advances each sequence's state of recurrent layer ``layer`` by Mamba's recurrence; out = what is read from
    it, times silu of the last columns of ``gated``.

    ``x`` (rows, channels) was convolved; ``dt`` (rows, channels) are steps before softplus, ``b`` and ``c`` (rows,
    size) what is written and read. A rank's op has channels from ``first_channel`` of ``x`` on, as many as ``dt``.
    """

    x: str
    dt: str
    b: str
    c: str
    gated: str
    layer: int
    a_log: str  # (channels, size): log of the decay's rate
    skip: str  # (channels,): factor on x, which is added to the output
    size: int
    out: str
    first_channel: int = 0
