"""Computes the last norm and the projection to the vocabulary, for the sampled rows only. Knows nothing of
sampling.
"""

from __future__ import annotations

from torch import Tensor

from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.reference import linear
from baton.kernels.rms_norm.reference import rms_norm


def lm_head(
    x: Tensor, delta: Tensor, rows: Tensor, norm: Tensor, eps: float, weight: Tensor | PackedWeight,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Projects: x, delta (tokens, hidden), rows (sampled,) -> logits (sampled, vocab), float32; with ``softcap`` a
    logit l is softcap x tanh(l / softcap).
    """
    _, last = rms_norm(x.index_select(0, rows), delta.index_select(0, rows), norm, eps)
    logits = linear(last, weight)
    return ((logits / softcap).tanh() * softcap if softcap else logits).float()
