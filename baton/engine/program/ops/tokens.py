"""Defines the ops at both ends of a program: tokens to rows, rows to logits.

Knows nothing of how an op is computed. A name that an op writes is a register.
"""

from __future__ import annotations

from baton.engine.program.ops.base import BaseOp


class Embedding(BaseOp, frozen=True, tag=True):
    """Looks tokens up: out = weight[token] x scale."""

    weight: str
    out: str
    scale: float = 1.0


class LmHead(BaseOp, frozen=True, tag=True):
    """Computes the logits of the step's sampled rows: norm(x + delta) · weightᵀ, a logit l then softcap x
    tanh(l / softcap) where there is one.

    ``scale`` is what the norm's weight was multiplied by, for logits that are scaled; hidden states aren't.
    """

    x: str
    delta: str
    norm: str
    eps: float
    weight: str
    softcap: float = 0.0
    scale: float = 1.0
