"""Defines the first and the last op of a program: tokens to rows, rows to logits.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class Embedding(BaseOp, frozen=True, tag=True):
    """Looks up embeddings: out = weight[token] x scale."""

    weight: str
    out: str
    scale: float = 1.0


class LmHead(BaseOp, frozen=True, tag=True):
    """Computes the logits of the rows that choose a token: norm(x + delta) · weightᵀ; with ``softcap``, a logit l
    becomes softcap x tanh(l / softcap).

    ``scale`` is the factor that the norm's weight and ``norm_bias`` already contain to scale logits; hidden states
    are returned without it. ``norm_bias`` (hidden,) is added to the normed rows and ``bias`` (vocab,) to logits,
    before they are capped, unless None.
    """

    x: str
    delta: str
    norm: str
    eps: float
    weight: str
    softcap: float = 0.0
    scale: float = 1.0
    norm_bias: str | None = None
    bias: str | None = None
