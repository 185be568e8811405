"""Defines the ops of encoders, which read a whole text in both directions.

Knows nothing of how an op is computed. A name that an op writes is a register with a row for each token.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class EmbedText(BaseOp, frozen=True, tag=True):
    """Looks tokens up: out = words[id] + places[position + first] + types[type], where there are such tables.

    A token's number is its type times the rows of ``words``, plus its id.
    """

    words: str
    places: str | None
    first: int
    types: str | None
    out: str


class LayerNorm(BaseOp, frozen=True, tag=True):
    """Adds the residual and norms it by mean and variance: x += delta (unless None); out = norm(x) x weight + bias.

    ``out`` may be ``x``.
    """

    x: str
    delta: str | None
    weight: str
    bias: str | None
    eps: float
    out: str


class FullAttention(BaseOp, frozen=True, tag=True):
    """Attends from every token of a text to every other one, ``window`` tokens to each side at most, 0 for all.

    ``qkv`` (rows, 3 x heads x head size). ``rope`` is the number in ``Program.ropes`` of what turns q and k.
    """

    qkv: str
    window: int
    rope: int | None
    out: str


class Activate(BaseOp, frozen=True, tag=True):
    """Applies ``activation``: out = activation(x); ``gated``: of the first half of x, times the second one."""

    x: str
    activation: str
    gated: bool
    out: str


class Classify(BaseOp, frozen=True, tag=True):
    """Scores a text: its scores = out · norm(activation(dense · row + dense_bias)) + out_bias.

    ``row`` is that of the text's first token, or with ``mean`` the mean of all. ``norm`` may be absent.
    """

    x: str
    mean: bool
    dense: str
    dense_bias: str | None
    activation: str
    norm: str | None
    eps: float
    out: str
    out_bias: str
