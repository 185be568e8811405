"""The last norm and the projection to the vocabulary, for the sampled rows only. Knows nothing of sampling."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.reference import linear
from baton.kernels.lora.reference import AdaptedRows, lora
from baton.kernels.rms_norm.reference import rms_norm


def lm_head(
    x: Tensor, delta: Tensor, rows: Tensor, norm: Tensor, eps: float, weight: Tensor | PackedWeight,
    softcap: float = 0.0, beside: Iterable[AdaptedRows] = (),
) -> Tensor:  # fmt: skip
    """Returns the logits (sampled, vocab) float32 of the rows ``rows`` (sampled,) of x + delta (tokens, hidden).

    With ``softcap`` a logit l becomes softcap x tanh(l / softcap). ``beside`` adds adapters' outputs for some rows
    of x.
    """
    _, last = rms_norm(x.index_select(0, rows), delta.index_select(0, rows), norm, eps)
    logits = linear(last, weight)
    for group in beside:
        mine = torch.isin(rows, group.rows.to(rows.device)).nonzero()[:, 0]
        logits = lora(logits, last, [group._replace(rows=mine)])
    return capped(logits, softcap).float()


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Returns softcap x tanh(l / softcap) of each logit l, in any shape; ``logits`` themselves for 0."""
    return (logits / softcap).tanh() * softcap if softcap else logits
