"""Defines the ops of encoders, which read a whole text in both directions.

Knows nothing of how an op is computed. A name that an op writes is a register with a row for each token.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class EmbedText(BaseOp, frozen=True, tag=True):
    """Embeds tokens: out = words[id] + places[position + first] + types[type], without tables that are None.

    A token's number is its type times the rows of ``words``, plus its id.
    """

    words: str
    places: str | None
    first: int
    types: str | None
    out: str


class LayerNorm(BaseOp, frozen=True, tag=True):
    """Adds ``delta`` to the residual and norms it by mean and variance: x += delta (unless None); out = norm(x) x
    weight + bias.

    ``out`` may be ``x``. Decoders such as Starcoder2 have it, too.
    """

    x: str
    delta: str | None
    weight: str
    bias: str | None
    eps: float
    out: str


class FullAttention(BaseOp, frozen=True, tag=True):
    """Attends from every token of a text to all others, at most ``window`` tokens to each side, 0 for all.

    ``qkv`` is (rows, 3 x heads x head size). ``rope`` is the index in ``Program.ropes`` of the rotation of q and k,
    None for none.
    """

    qkv: str
    window: int
    rope: int | None
    out: str


class Activate(BaseOp, frozen=True, tag=True):
    """Applies ``activation``: out = activation(x); if ``gated``, out = activation(first half of x) x second
    half.
    """

    x: str
    activation: str
    gated: bool
    out: str


class Classify(BaseOp, frozen=True, tag=True):
    """Scores a text: score = out · norm(activation(dense · row + dense_bias)) + out_bias.

    ``row`` is the first token's, or with ``mean`` the mean over all tokens. ``norm`` may be None.
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
