"""Quantized weights as checkpoints hold them, before packing. Knows nothing of files or of panels.

Tensors that a model stacks (q, k and v) may come in different forms; ``stack`` brings them to one that holds all
of them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight, pack_bf16, pack_integers

SPREAD = 128  # the group that a row's scale is spread over where one is needed


class Integers(NamedTuple):
    """value = scales x q - mins. ``q`` (n, k) int8 within ``bits``; ``scales``, ``mins`` float32 (n, groups), each
    over ``group`` inputs; group 0: one per row.
    """

    q: Tensor
    bits: int
    group: int
    scales: Tensor
    mins: Tensor | None = None


class Scaled(NamedTuple):
    """value = scale x narrow: ``narrow`` (n, k) of few bits (fp8), exact in bf16; ``scale`` float32 (n,)."""

    narrow: Tensor
    scale: Tensor


def stack(parts: Sequence[Integers]) -> PackedWeight:
    """Along the rows, packed. 4 bits stay 4 bits where all parts are."""
    bits, group = max(part.bits for part in parts), _common_group(parts)
    scales = torch.cat([_spread(part.scales, part, group) for part in parts])
    mins = None
    if any(part.mins is not None for part in parts):
        mins = torch.cat([_spread(_mins(part), part, group) for part in parts])
    return pack_integers(torch.cat([part.q for part in parts]), bits, group, scales, mins)


def stack_scaled(parts: Sequence[Scaled]) -> PackedWeight:
    """Along the rows, packed as bf16 with a scale per row."""
    return pack_bf16(torch.cat([p.narrow.to(torch.bfloat16) for p in parts]), torch.cat([p.scale for p in parts]))


def _common_group(parts: Sequence[Integers]) -> int:
    """The widest group that divides everybody's; mins need one, so rows' scales are spread where there are any."""
    group = math.gcd(*(part.group for part in parts))
    return group or (SPREAD if any(part.mins is not None for part in parts) else 0)


def _mins(part: Integers) -> Tensor:
    return torch.zeros_like(part.scales) if part.mins is None else part.mins


def _spread(x: Tensor, part: Integers, group: int) -> Tensor:
    """(n, part's groups) -> (n, groups of ``group``)."""
    if part.group == group:
        return x
    groups = -(-part.q.shape[1] // group)
    repeats = part.group // group if part.group else groups
    return x.repeat_interleave(repeats, 1)[:, :groups]
