"""Defines the ops that store and read KV, and that gate attention's output.

Knows nothing of how an op is computed. Ops read and write registers by name.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class RopeAppend(BaseOp, frozen=True, tag=True):
    """Norms q and k head by head (if ``q_norm`` and ``k_norm`` are given), rotates them by ``Program.ropes[rope]``,
    and stores k and v in ``layer``; out = q.

    ``qkv`` has q, k and v side by side; they are stored at the step's positions.
    """

    qkv: str
    layer: int
    q_norm: str | None
    k_norm: str | None
    eps: float
    out: str
    rope: int = 0


class PagedAttention(BaseOp, frozen=True, tag=True):
    """Computes attention: out = attention of q over the KV of ``layer``, at most ``window`` tokens back, 0 for all.

    With ``softcap`` a score s becomes softcap x tanh(s / softcap). ``sinks`` (heads,) are scores that join each
    head's softmax without a value.
    """

    q: str
    layer: int
    window: int
    out: str
    softcap: float = 0.0
    sinks: str | None = None


class LatentAttention(BaseOp, frozen=True, tag=True):
    """Stores latents and attends to them with absorbed projections (https://arxiv.org/abs/2405.04434); out is
    (rows, heads x value_dim).

    ``q`` is (rows, heads x (nope_dim + rope_dim)), its last ``rope_dim`` numbers per head to be rotated.
    ``latent`` is (rows, rank + rope_dim): the first ``rank`` numbers are normed by ``norm``, the others are the key
    that all heads share; ``layer`` stores both. ``expand`` (heads x (nope_dim + value_dim), rank) makes each head's
    key and value of a latent. ``paired`` rotates neighbours instead of halves; ``scale`` multiplies scores.
    """

    q: str
    latent: str
    layer: int
    norm: str
    expand: str
    eps: float
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    paired: bool
    scale: float
    out: str


class GatedHeads(BaseOp, frozen=True, tag=True):
    """Splits rows in which each head of q is followed by its gate: out = q, k and v side by side; gate = the
    gates.
    """

    x: str
    out: str
    gate: str


class Gate(BaseOp, frozen=True, tag=True):
    """Multiplies rows by gates: out = sigmoid(gate) x x."""

    x: str
    gate: str
    out: str


class HalveHeads(BaseOp, frozen=True, tag=True):
    """Reorders the first ``width`` numbers of each head of q and k from pairs of neighbours to halves, as
    ``RopeAppend`` rotates them.

    ``x`` has q, k and v side by side; out may be x.
    """

    x: str
    width: int
    out: str


class TemperQueries(BaseOp, frozen=True, tag=True):
    """Scales queries by position (https://arxiv.org/abs/2501.19399): q x (1 + scale x log(1 + floor(p / floor))).

    p is the position plus ``shift``. ``x`` has q, k and v side by side; out may be x.
    """

    x: str
    scale: float
    floor: float
    shift: int
    out: str


class RotateHeads(BaseOp, frozen=True, tag=True):
    """Rotates the heads of q and k in ``x`` to their positions by the program's first rope, before they are normed;
    out has the same columns.
    """

    x: str
    out: str
