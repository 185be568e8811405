"""A dense layer. Knows nothing of what its rows mean.

On x86 CPUs a float32 row's bits don't depend on the batch as long as the rows are a multiple of four: the
GEMM's row tails are what rounds differently (measured). The caller pads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(rows, in) and (out, in) -> (rows, out)."""
    return F.linear(x, weight, bias)
