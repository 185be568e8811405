"""Defines the ops that take each row by itself: norms, residuals, products, adapters, gated activations.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class RmsNorm(BaseOp, frozen=True, tag=True):
    """Adds the residual and norms it: x += delta (unless None); out = norm(x) x weight."""

    x: str
    delta: str | None
    weight: str
    eps: float
    out: str


class Add(BaseOp, frozen=True, tag=True):
    """Adds the residual where no norm follows: x += delta."""

    x: str
    delta: str


class NormPart(BaseOp, frozen=True, tag=True):
    """Norms columns ``first`` to ``first`` + ``width`` - 1 of each row of ``x`` in place, as one vector."""

    x: str
    first: int
    width: int
    weight: str
    eps: float


class Linear(BaseOp, frozen=True, tag=True):
    """Multiplies by a weight: out = x · weightᵀ + bias."""

    x: str
    weight: str
    bias: str | None
    out: str


class Adapt(BaseOp, frozen=True, tag=True):
    """Adds the rows' adapters beside a weight: out += scale x B · (A · x), where the row's sequence has one.

    ``x`` None: it stands beside a table that tokens are looked up in.
    """

    x: str | None
    weight: str
    out: str


class SwiGlu(BaseOp, frozen=True, tag=True):
    """Applies the gated activation: out = silu(gate) x up."""

    gate_up: str
    out: str


class GeGlu(BaseOp, frozen=True, tag=True):
    """Applies Gemma's gated activation: out = gelu(gate) x up, gelu by its tanh approximation."""

    gate_up: str
    out: str


class Center(BaseOp, frozen=True, tag=True):
    """Takes each row's mean from it: out = x - mean(x); out may be x."""

    x: str
    out: str


class ScaleRows(BaseOp, frozen=True, tag=True):
    """Multiplies each row by its number in ``factor`` (rows, 1): out = x x factor."""

    x: str
    factor: str
    out: str
