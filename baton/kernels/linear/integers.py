"""Quantized weights as in checkpoints, before packing.

Knows nothing of files or of panels. Tensors that a model stacks (q, k and v) may come in different forms; ``stack``
brings them to one form that holds all of them exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.linear.codes import Codes, stack_codes
from baton.kernels.linear.packed import (
    E4M3_A16,
    ORDERED,
    PANEL,
    W8,
    W8_OUTLIERS,
    PackedWeight,
    pack_e4m3,
    pack_e4m3_groups,
    pack_integers,
)
from baton.kernels.linear.panels import orders

SPREAD = 128  # inputs of the group that a row's scale is spread over where groups are needed


class Integers(NamedTuple):
    """A weight of integers: value = scales x q - mins.

    Above 0, ``outliers`` is the magnitude from which on activations are multiplied in float; it needs 8 bits and
    group 0.
    """

    q: Tensor  # (n, k) int8, within ``bits``
    bits: int
    group: int  # inputs per scale; 0 for one per row
    scales: Tensor  # (n, groups) float32
    mins: Tensor | None = None  # (n, groups) float32
    outliers: float = 0.0  # 0 for none
    order: Tensor | None = None  # (k,) int32, the input that each column multiplies; None for their own order


class ScaledFloats(NamedTuple):
    """A weight of narrow floats: value = scale x narrow."""

    narrow: Tensor  # (n, k) float8_e4m3fn
    scale: Tensor  # (n, groups) float32
    group: int = 0  # inputs per scale; 0 for one per row
    rows: float | None = None  # scale for rounding activations to e4m3, 0: each row's own; None: they stay


Part = Integers | ScaledFloats | Codes


def packed_of(parts: Sequence[Tensor | Part]) -> PackedWeight | None:
    """Returns the parts stacked along the rows and packed in their common form; None if they have none."""
    for form, stacked in _STACKS.items():
        if all(isinstance(part, form) for part in parts):
            return stacked(parts)
    return None


def values_of(part: Tensor | Part) -> Tensor:
    """Returns the values (n, k) that a part stands for."""
    if isinstance(part, Tensor):
        return part
    found = packed_of([part])
    assert found is not None
    return found.dequantized()


def stack(parts: Sequence[Integers]) -> PackedWeight:
    """Returns the parts stacked along the rows and packed, with 4 bits only if all have 4. Each keeps the order of
    its inputs.
    """
    packed = _stack(parts)
    table = orders.stacked([part.order for part in parts], [len(part.q) for part in parts], packed.k, PANEL)
    return packed if table is None else dataclasses.replace(packed, kind=ORDERED[packed.kind], table=table)


def _stack(parts: Sequence[Integers]) -> PackedWeight:
    bits, group = max(part.bits for part in parts), _common_group(parts)
    scales = torch.cat([_spread(part.scales, part, group) for part in parts])
    mins = None
    if any(part.mins is not None for part in parts):
        mins = torch.cat([_spread(_mins(part), part, group) for part in parts])
    packed = pack_integers(torch.cat([part.q for part in parts]), bits, group, scales, mins)
    least = min(part.outliers for part in parts)
    if packed.kind != W8 or group or not least:
        return packed
    return dataclasses.replace(packed, kind=W8_OUTLIERS, table=torch.tensor([least]))


def stack_scaled(parts: Sequence[ScaledFloats]) -> PackedWeight:
    """Returns the parts stacked along the rows and packed; scales per row become scales per group if any part has
    groups.
    """
    packed = _stack_scaled(parts)
    own = [part.rows for part in parts if part.rows is not None]
    if len(own) < len(parts) or (0.0 in own and any(own)):  # rows of all parts are the same rows
        return packed
    return dataclasses.replace(packed, table=torch.tensor([max(own)]))


def _stack_scaled(parts: Sequence[ScaledFloats]) -> PackedWeight:
    values, group = torch.cat([part.narrow for part in parts]), math.gcd(*(part.group for part in parts))
    if not group:
        return pack_e4m3(values, torch.cat([part.scale[:, 0] for part in parts]), E4M3_A16)
    groups = -(-values.shape[1] // group)
    scales = [p.scale.repeat_interleave(p.group // group if p.group else groups, 1)[:, :groups] for p in parts]
    return pack_e4m3_groups(values, group, torch.cat(scales))


def _common_group(parts: Sequence[Integers]) -> int:
    """Returns the widest group size that divides those of all parts; mins need groups."""
    group = math.gcd(*(part.group for part in parts))
    return group or (SPREAD if any(part.mins is not None for part in parts) else 0)


def _mins(part: Integers) -> Tensor:
    return torch.zeros_like(part.scales) if part.mins is None else part.mins


def _spread(x: Tensor, part: Integers, group: int) -> Tensor:
    """Returns ``x`` (n, part's groups) repeated to (n, groups of ``group`` inputs)."""
    if part.group == group:
        return x
    groups = -(-part.q.shape[1] // group)
    repeats = part.group // group if part.group else groups
    return x.repeat_interleave(repeats, 1)[:, :groups]


_STACKS: dict[type, Callable[..., PackedWeight | None]] = {
    Integers: stack,
    ScaledFloats: stack_scaled,
    Codes: stack_codes,
}
