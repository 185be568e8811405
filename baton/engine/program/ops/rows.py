"""Defines the ops that compute each row by itself: norms, residuals, products, adapters, gated activations.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class RmsNorm(BaseOp, frozen=True, tag=True):
    """Adds ``delta`` to the residual and norms it: x += delta (unless None); out = x / rms(x) x weight."""

    x: str
    delta: str | None
    weight: str
    eps: float
    out: str


class Add(BaseOp, frozen=True, tag=True):
    """Adds to the residual without a norm: x += delta."""

    x: str
    delta: str


class NormPart(BaseOp, frozen=True, tag=True):
    """Norms columns ``first`` … ``first + width - 1`` of each row of ``x`` by RMS in place, as one vector."""

    x: str
    first: int
    width: int
    weight: str
    eps: float


class Linear(BaseOp, frozen=True, tag=True):
    """Multiplies by a weight (outputs, inputs): out = x · weightᵀ + bias."""

    x: str
    weight: str
    bias: str | None
    out: str


class Adapt(BaseOp, frozen=True, tag=True):
    """Adds the LoRA adapters of the rows' sequences to a weight's output: out += scale x B · (A · x), if a sequence
    has one.

    ``x`` is None if the weight is an embedding table.
    """

    x: str | None
    weight: str
    out: str


class SwiGlu(BaseOp, frozen=True, tag=True):
    """Applies the gated activation out = silu(gate) x up; each row of ``gate_up`` is gate, then up."""

    gate_up: str
    out: str


class GeGlu(BaseOp, frozen=True, tag=True):
    """Applies Gemma's gated activation out = gelu(gate) x up, with gelu's tanh approximation; each row of
    ``gate_up`` is gate, then up.
    """

    gate_up: str
    out: str


class Center(BaseOp, frozen=True, tag=True):
    """Subtracts each row's mean: out = x - mean(x); out may be x."""

    x: str
    out: str


class ScaleRows(BaseOp, frozen=True, tag=True):
    """Multiplies each row by its number in ``factor`` (rows, 1): out = x x factor."""

    x: str
    factor: str
    out: str
