"""Weights as codes, indices into a table of sixteen numbers (NF4, FP4, MXFP4, NVFP4, IQ4_NL).

Knows nothing of files. The kernel's table is int8, since rows of activations are int8 too; for rows of bfloat16 it
is bfloat16. E2M1 and IQ4_NL fit both exactly. As int8, NF4's numbers are off by at most 0.4% of the largest, which
adds 0.3% to the squared error of rounding to NF4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight, pack_codes

TOP = 127  # the largest magnitude in the kernel's table
LEAST = 64  # the smallest that a table's largest number is rounded to
# Doubled values of the 4-bit float E2M1 (OCP Microscaling Formats v1.0, 5.3.3), by code.
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Codes(NamedTuple):
    """A weight of 4-bit codes: value = row_scale x scales x table[code]."""

    codes: Tensor  # (n, k) uint8 below 16
    table: Tensor  # (16,) float32
    group: int  # inputs per scale, a multiple of 16
    scales: Tensor  # (n, groups) float32; if ``row_scale`` is given, float16 must hold them
    row_scale: Tensor | None = None  # (n,) float32; None for ones


def e2m1(codes: Tensor, group: int, scales: Tensor, row_scale: Tensor | None = None) -> Codes:
    """Returns ``Codes`` of E2M1 numbers, whose table the kernel holds exactly."""
    halves = scales / 2
    return Codes(codes, torch.tensor(E2M1_TWICE, dtype=torch.float32), group, halves, row_scale)


def nibbles(packed: Tensor, first_high: bool = False) -> Tensor:
    """Returns bytes (n, bytes) uint8 split into 4-bit numbers (n, 2 x bytes), low bits first unless
    ``first_high``.
    """
    halves = (packed >> 4, packed & 15) if first_high else (packed & 15, packed >> 4)
    return torch.stack(halves, -1).flatten(-2)


def stack_codes(parts: Sequence[Codes]) -> PackedWeight | None:
    """Returns the parts stacked along the rows and packed; None if they have different tables."""
    table, unit = whole_table(parts[0].table)
    if not all(torch.equal(part.table, parts[0].table) for part in parts):
        return None
    group = math.gcd(*(part.group for part in parts))
    scales = torch.cat([_spread(part, group) for part in parts])
    rows = None
    if all(part.row_scale is not None for part in parts):
        rows = torch.cat([part.row_scale for part in parts if part.row_scale is not None]) * unit
    elif all(part.row_scale is None for part in parts):
        scales = scales * unit
    else:
        return None
    exact = parts[0].table / unit
    return pack_codes(torch.cat([part.codes for part in parts]), table, group, scales, rows, exact)


def whole_table(table: Tensor) -> tuple[Tensor, float]:
    """Returns a table (16,) as int8 and the float that it is to be multiplied by.

    The factor is 1 if the table holds small whole numbers, else that of least squared error.
    """
    peak = float(table.abs().max())
    if peak <= TOP and bool((table == table.round()).all()):
        return table.to(torch.int8), 1.0
    tops = torch.arange(TOP, LEAST, -0.125, dtype=torch.float64)
    scaled = table.double() / peak * tops[:, None]
    errors = ((scaled.round() - scaled) / tops[:, None]).square().sum(1)
    best = int(errors.argmin())
    return scaled[best].round().to(torch.int8), peak / float(tops[best])


def _spread(part: Codes, group: int) -> Tensor:
    """Returns the scales of ``part`` repeated so that each is for ``group`` inputs."""
    groups = -(-part.codes.shape[1] // group)
    return part.scales.float().repeat_interleave(part.group // group, 1)[:, :groups]
