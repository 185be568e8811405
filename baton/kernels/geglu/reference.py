"""Gemma's gated activation (https://arxiv.org/abs/2002.05202), with the tanh approximation of GELU.

Knows nothing of weights.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def geglu(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) x up, (rows, inner), for ``gate_up`` (rows, 2 x inner), gate first."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
