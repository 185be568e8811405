"""Packs float32 weights in the panels that the native step reads (dense.h draws them). Knows nothing of
models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight
from baton.kernels.step.structs import LINEAR_F32, PANEL


def pack_f32(weight: Tensor) -> PackedWeight:
    """Packs (n, k) as [n / 64 up][k][64] floats, with zeros in the last panel's padding."""
    n, k = weight.shape
    rows = F.pad(weight.float(), (0, 0, 0, -n % PANEL)).view(-1, PANEL, k)
    return PackedWeight(LINEAR_F32, n, k, 0, rows.transpose(1, 2).contiguous().view(-1).view(torch.uint8))


def unpack_f32(weight: PackedWeight) -> Tensor:
    """Returns the packed weight as (n, k) float32 again."""
    panels = weight.data.view(torch.float32).view(-1, weight.k, PANEL).transpose(1, 2)
    return panels.reshape(-1, weight.k)[: weight.n]
