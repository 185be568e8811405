"""Applies the gated activation of Llama-like MLPs (https://arxiv.org/abs/2002.05202). Knows nothing of
weights.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Gates: (rows, 2 x inner), gate first -> silu(gate) x up, (rows, inner)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
