"""Defines the ops of models with several residual streams, inputs of each layer's own, and layers that read the K
and V of others, as Gemma 3n has them.

Knows nothing of how an op is computed. A name that an op writes is a register. ``x`` is the first stream;
``streams`` has the others side by side, each as wide as ``x``.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class LayerInputs(BaseOp, frozen=True, tag=True):
    """Computes each layer's own inputs: out = (norm(x) + scale x table[token]) / sqrt(2), with all layers side by
    side, ``width`` columns each.

    The columns of a layer are normed by themselves. A token that ``table`` has no row for reads its first row.
    """

    x: str
    table: str
    norm: str  # (width,)
    width: int
    eps: float
    scale: float
    out: str


class GateInputs(BaseOp, frozen=True, tag=True):
    """Gates a layer's own inputs: out = gelu(x) x columns ``first`` and up of ``inputs``, with gelu's tanh
    approximation.
    """

    x: str
    inputs: str
    first: int
    out: str


class Sparsen(BaseOp, frozen=True, tag=True):
    """Lowers the gates of an MLP, the first half of ``x``, by their mean plus ``deviations`` standard deviations,
    and sets those below to 0; out may be x.
    """

    x: str
    deviations: float
    out: str


class MatchSize(BaseOp, frozen=True, tag=True):
    """Scales each stream in ``streams`` to the root mean square of ``x``; out may be streams."""

    x: str
    streams: str
    out: str


class SumRows(BaseOp, frozen=True, tag=True):
    """Adds registers of one width: out = scale x their sum."""

    xs: tuple[str, ...]
    scale: float
    out: str


class PredictStreams(BaseOp, frozen=True, tag=True):
    """Predicts all streams before a layer (AltUp, https://arxiv.org/abs/2301.13310): each becomes itself plus a mix
    of all; ``x`` and ``streams`` are changed in place.

    With n streams, m = tanh(router · norm(x) / columns of x) are n numbers per row. To stream k is added the sum
    over j of stream j x (row n x k + j of ``mix`` · m). ``router`` is (n, columns of x), ``mix`` (n x n, n).
    """

    x: str
    streams: str
    norm: str
    router: str
    mix: str
    eps: float


class CorrectStreams(BaseOp, frozen=True, tag=True):
    """Corrects all streams by what a layer made of the first one, ``y``: stream k gets (1 + row k of ``mix`` · m) x
    (y - x); ``x`` and ``streams`` are changed in place.

    ``m`` are the numbers of ``PredictStreams``, from y. ``mix`` is (n, n). out = x x ``gain`` (columns of x,), or x
    if that is None.
    """

    x: str
    streams: str
    y: str
    norm: str
    router: str
    mix: str
    eps: float
    gain: str | None
    out: str


class AddToEach(BaseOp, frozen=True, tag=True):
    """Adds to each stream in ``streams``, in place: stream += delta."""

    streams: str
    delta: str


class RotateQueries(BaseOp, frozen=True, tag=True):
    """Norms queries head by head by ``norm`` and rotates them by ``Program.ropes[rope]``, for attention to K and V
    of another layer; out may be x.
    """

    x: str
    norm: str | None
    eps: float
    rope: int
    out: str
