"""Defines the ops that store and read KV, and what gates their outputs.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class RopeAppend(BaseOp, frozen=True, tag=True):
    """Norms (Qwen3) and rotates q and k by ``rope`` of ``Program.ropes``, stores k and v at the step's positions
    of ``layer``; out = q.
    """

    qkv: str
    layer: int
    q_norm: str | None
    k_norm: str | None
    eps: float
    out: str
    rope: int = 0


class PagedAttention(BaseOp, frozen=True, tag=True):
    """Attends: out = attention of q over the pages of ``layer``, ``window`` tokens back at most, 0 for all.

    With ``softcap`` a score s is softcap x tanh(s / softcap). ``sinks`` (heads,) holds each head's score of a key
    that every row sees and that has no value.
    """

    q: str
    layer: int
    window: int
    out: str
    softcap: float = 0.0
    sinks: str | None = None


class LatentAttention(BaseOp, frozen=True, tag=True):
    """Stores latents and attends to them with absorbed projections (https://arxiv.org/abs/2405.04434).

    ``q`` (rows, heads x (plain + turned)), its last ``turned`` numbers per head to be rotated; ``latent`` (rows,
    rank + turned): normed by ``norm`` but for its last ``turned``, the key that all heads share, it is what
    ``layer`` keeps of a token. ``expand`` (heads x (plain + value), rank) makes each head's key and value of it.
    ``paired`` rotates neighbours instead of halves. out (rows, heads x value).
    """

    q: str
    latent: str
    layer: int
    norm: str
    expand: str
    eps: float
    plain: int
    turned: int
    value: int
    rank: int
    paired: bool
    scale: float
    out: str


class GatedHeads(BaseOp, frozen=True, tag=True):
    """Takes rows apart in which each head of q is followed by its gate: out = q, k and v side by side, and gate."""

    x: str
    out: str
    gate: str


class Gate(BaseOp, frozen=True, tag=True):
    """Gates rows: out = sigmoid(gate) x x."""

    x: str
    gate: str
    out: str


class HalveHeads(BaseOp, frozen=True, tag=True):
    """Moves numbers that are rotated with their neighbours half of ``width`` apart, as ``RopeAppend`` rotates them.

    Of each head of q and k the first ``width`` numbers are moved. ``x`` has q, k and v side by side; out may be x.
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
