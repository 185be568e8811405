"""Defines torch.ops.baton.linear: packed weights of every kind, for float32 rows.

Knows nothing of models. A packed weight is passed to torch as its parts: ``PACKED`` in a schema, ``*parts(weight)``
in a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.kernels.abi.native import I64, P
from baton.kernels.abi.torch_library import address, define, dense, require, runs_natively, symbol
from baton.kernels.linear import reference
from baton.kernels.linear.packed import (
    A16,
    BF16,
    CODE_COUNT,
    CODES,
    E4M3,
    E4M3_A8,
    E4M3_A16,
    ORDERED,
    PANEL,
    W4,
    W4_ORDERED,
    W8,
    W8_ORDERED,
    W8_OUTLIERS,
    PackedWeight,
    padded,
)
from baton.kernels.linear.packed_floats import unpack_f32
from baton.kernels.step.structs import LINEAR_F16, LINEAR_F32

# Of CODES, W8_OUTLIERS and E4M3_A8 ``mins`` is the table; ordered kinds alone have an ``order``.
PACKED = (
    "Tensor data, Tensor? scales, Tensor? mins, Tensor? row_scale, int kind, int group, int n, int k, Tensor? order"
)
PARTS = 9  # arguments that PACKED makes up
HALF_BYTES = {
    BF16: 4,
    W8: 2,
    W4: 1,
    E4M3: 2,
    CODES: 1,
    E4M3_A16: 2,
    W8_OUTLIERS: 2,
    E4M3_A8: 2,
    W8 + A16: 2,
    W4 + A16: 1,
    CODES + A16: 1,
    **dict.fromkeys((W8_ORDERED, W8_ORDERED + A16), 2),
    **dict.fromkeys((W4_ORDERED, W4_ORDERED + A16), 1),
    LINEAR_F32: 8,
    LINEAR_F16: 4,
}  # of one element
ORDERED_KINDS = (*ORDERED.values(), *(kind + A16 for kind in ORDERED.values()))
GROUPED = (W8, W4, CODES, E4M3_A16, E4M3_A8, W8 + A16, W4 + A16, CODES + A16, *ORDERED_KINDS)
# The dtype and numbers of a kind's table.
TABLES = {
    CODES: (torch.int8, 3 * CODE_COUNT),
    CODES + A16: (torch.int8, 3 * CODE_COUNT),
    W8_OUTLIERS: (torch.float32, 1),
    E4M3_A8: (torch.float32, 1),
}

Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, int, int, int, int, Tensor | None]


def parts(weight: PackedWeight) -> Parts:
    """Returns the arguments of an op that ``PACKED`` declares, for ``weight``."""
    w = weight
    order = w.table if w.is_ordered else None
    return w.data, w.scales, w.table if w.kind in TABLES else w.mins, w.row_scale, w.kind, w.group, w.n, w.k, order


def whole(found: Any) -> PackedWeight:
    """Returns the weight that the arguments ``PACKED`` make up. Raises ValueError if they don't fit one another."""
    data, scales, mins, row_scale, kind, group, n, k, order = found
    require(kind in HALF_BYTES, f"linear: kind {kind} is none of {sorted(HALF_BYTES)}")
    grouped = kind in GROUPED and group > 0 and group % 16 == 0
    require(
        grouped or (group == 0 and kind not in (CODES, CODES + A16)),
        "linear: group is 0 or, of integers, a multiple of 16",
    )
    is_float = kind in (LINEAR_F32, LINEAR_F16)
    width, rows = k if is_float else padded(k, group), -(-n // PANEL) * PANEL
    _require_part("data", data, torch.uint8, rows * width * HALF_BYTES[kind] // 2)
    _require_part("scales", scales, torch.float16, rows * width // group if grouped else None)
    if kind in TABLES:
        _require_part("mins (its table)", mins, *TABLES[kind])
    elif mins is not None:
        _require_part("mins", mins, torch.float16, rows * width // group if grouped else None)
    if not (kind == BF16 or is_float) or row_scale is not None:
        _require_part("row_scale", row_scale, torch.float32, None if is_float else rows)
    count = 1 if order is None or not k else order.numel() // k
    require(count > 0 and rows % count == 0, "linear: order has an order of all inputs for equally many rows")
    _require_part("order", order, torch.int32, count * k if kind in ORDERED_KINDS else None)
    inside = order is None or not k or (int(order.min()) >= 0 and int(order.max()) < k)
    require(inside, f"linear: order has inputs from 0 to {k - 1}")
    lows, table = (None, mins) if kind in TABLES else (mins, order)
    return PackedWeight(kind, n, k, group, data, scales, lows, row_scale, table)


def _require_part(name: str, part: Tensor | None, dtype: torch.dtype, count: int | None) -> None:
    """Raises ValueError unless ``part`` has ``count`` contiguous numbers, or is absent if ``count`` is None."""
    if part is None or count is None:
        said = "has no" if count is None else "needs its"
        require(part is None and count is None, f"linear: such a weight {said} {name}")
        return
    fits = part.dtype == dtype and part.numel() == count and part.is_contiguous()
    require(fits, f"linear: {name} is {count} of {dtype}, side by side")


def by_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Returns the product by the reference implementation, also for float32 and float16 weights."""
    if weight.kind in (LINEAR_F32, LINEAR_F16):
        return reference.linear(x, unpack_f32(weight), bias)
    return reference.linear(x, weight, bias)


def _fake(x: Tensor, *rest: Any) -> Tensor:
    n, k, bias = rest[6], rest[7], rest[PARTS]
    require(x.dim() == 2 and x.shape[1] == k, f"linear: x is (rows, {k})")
    require(bias is None or bias.shape == (n,), f"linear: the bias is ({n},)")
    return x.new_empty((x.shape[0], n))


@define(f"linear(Tensor x, {PACKED}, Tensor? bias) -> Tensor", _fake)
def linear(x: Tensor, *rest: Any) -> Tensor:
    """Returns x · weightᵀ + bias, (rows, n), for x (rows, k); ``rest`` are a packed weight's ``parts`` and the
    bias.

    Raises ValueError for arguments that don't fit.
    """
    call, out = symbol("dense", P, P, I64, I64, P, P, I64), _fake(x, *rest)
    weight, bias = whole(rest[:PARTS]), rest[PARTS]
    if call is None or weight.kind == E4M3 or not runs_natively(x, bias):
        return out.copy_(by_reference(x, weight, bias))
    rows, sent = dense(x), None if bias is None else bias.contiguous()
    call(weight.address, rows.data_ptr(), rows.stride(0), len(rows), address(sent), out.data_ptr(), out.stride(0))
    return out
