"""Lays bf16 weights out row by row, as cuBLASLt and a kernel of ours on a GPU take them (by_row.cuh draws them).

Knows nothing of devices. The bytes are as many as those of panels, so one form or the other is kept, not both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import BF16, PANEL, PackedWeight

BY_ROW = -1  # PackedLinear.group of such weights (by_row.cuh)
STEP = 8  # inputs to which a row is filled up: 16 bytes


def rows_of(weight: PackedWeight) -> Tensor:
    """Returns packed bf16 weights (n, k) row by row: bfloat16, n rounded up to 64 and k to 8, zeros behind both."""
    assert weight.kind == BF16, f"weights of kind {weight.kind} have no rows of bf16"
    plain = weight.data.view(torch.bfloat16).view(-(-weight.n // PANEL), -1, PANEL, 2).transpose(1, 2)
    whole = plain.reshape(len(plain) * PANEL, -1)
    return F.pad(whole, (0, -whole.shape[1] % STEP)).contiguous()
