"""Packs float32 and float16 weights into the panels that the native step reads (dense.h draws them).

Knows nothing of models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight, pack_bf16
from baton.kernels.step.structs import LINEAR_F16, LINEAR_F32, PANEL


def pack_f32(weight: Tensor) -> PackedWeight:
    """Packs a weight (n, k) as float32 [n / 64, rounded up][k][64], with zeros in the last panel's padding."""
    n, k = weight.shape
    return PackedWeight(LINEAR_F32, n, k, 0, _panels(weight.float()))


def pack_f16(weight: Tensor) -> PackedWeight:
    """Packs a weight (n, k) as float16 [n / 64, rounded up][k][64], which the step multiplies by float32 rows."""
    n, k = weight.shape
    return PackedWeight(LINEAR_F16, n, k, 0, _panels(weight.half()))


def pack_floats(weight: Tensor) -> PackedWeight:
    """Packs a weight (n, k) of float32, bfloat16 or float16 in its own dtype."""
    return {torch.float32: pack_f32, torch.bfloat16: pack_bf16, torch.float16: pack_f16}[weight.dtype](weight)


def unpack_f32(weight: PackedWeight) -> Tensor:
    """Returns a weight that ``pack_f32`` or ``pack_f16`` packed as (n, k) float32."""
    stored = torch.float16 if weight.kind == LINEAR_F16 else torch.float32
    panels = weight.data.view(stored).view(-1, weight.k, PANEL).transpose(1, 2)
    return panels.reshape(-1, weight.k)[: weight.n].float()


def _panels(weight: Tensor) -> Tensor:
    n, k = weight.shape
    rows = F.pad(weight, (0, 0, 0, -n % PANEL)).view(-1, PANEL, k)
    return rows.transpose(1, 2).contiguous().view(-1).view(torch.uint8)
