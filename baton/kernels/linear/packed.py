"""Packs weights into the panels that native linear reads (linear.h draws them), and back.

Knows nothing of checkpoints.

    rows n -> panels of 64;  a panel = steps over k;  a step = 64 rows x 2 (bf16), 4 (W8) or 8 (W4) inputs

The same bytes serve every ISA. A checkpoint's scales are kept as float16 times a power of two per row, so that
float16 scales stay exact and small ones don't underflow.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.panels import orders
from baton.kernels.linear.panels.layout import (
    PANEL,
    from_steps,
    in_panels,
    in_steps,
    nibbles,
    spread,
    whole_panels,
)
from baton.kernels.linear.rounding import EXACT, TINY, WHOLE, as_stored, best_integer_scales, best_scale, rounded

BF16, W8, W4 = 0, 1, 2  # kinds of weights: linear.h's LinearKind
E4M3 = 3  # a kind of form.cuh's: only a GPU has it, elsewhere the reference computes it
CODES, E4M3_A16, W8_OUTLIERS, W8_ORDERED, W4_ORDERED = 4, 5, 6, 7, 8  # narrow_forms.h's: only a CPU has them
E4M3_A8 = 9  # the same numbers as E4M3_A16 beside rows that are rounded to e4m3
CODE_COUNT = 16  # numbers of a table of CODES
A16 = 16  # added to a kind of integers or codes: rows of activations stay bfloat16 (weight-only)
ORDERED = {W8: W8_ORDERED, W4: W4_ORDERED}  # kinds by those of the same numbers in order
ROUNDED_ROWS = (W8, W4, CODES, *ORDERED.values())  # kinds whose rows are rounded to int8, all inputs of them
ROWS = ("data", "scales", "mins", "row_scale")  # what a PackedWeight has panel by panel
ZERO = {W8: 128, W4: 8, CODES: 0, W8_OUTLIERS: 128, W8_ORDERED: 128, W4_ORDERED: 8}
VERSION = 6  # this layout's and rounding's version: part of the name of what is cached on disk


def is_weight_only(kind: int) -> bool:
    """Returns whether weights of ``kind`` (integers or codes) multiply rows that stay bfloat16."""
    return A16 <= kind < 2 * A16


class PackedMatrixStruct(ctypes.Structure):
    """Mirrors PackedLinear of linear.h."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("mins", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("exact", ctypes.c_int64),
    ]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight (n, k) in panels.

    ``table`` depends on ``kind``:
    - CODES: the values of its codes, 16 int8 and after them the same as 16 bfloat16, all as int8
    - W8_OUTLIERS: the magnitude from which on inputs are multiplied in float, one float32
    - W8_ORDERED and W4_ORDERED: the input that each column multiplies, a table of ``orders``
    - E4M3_A8: the scale of rows, one float32; 0 if each row, or each group of one, has its own
    - E4M3_A16: the same, for rows that may be rounded; None if the checkpoint gives no rounding for them
    """

    kind: int
    n: int
    k: int
    group: int  # inputs per scale; 0 for one per row
    data: Tensor  # uint8, the panels in order
    scales: Tensor | None = None  # (panels, groups, 64) float16
    mins: Tensor | None = None  # (panels, groups, 64) float16
    row_scale: Tensor | None = None  # (panels x 64,) float32; None for plain bf16
    table: Tensor | None = None
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (self.n, self.k))

    @cached_property
    def struct(self) -> PackedMatrixStruct:
        """Returns the struct that native code takes; valid as long as this object lives."""
        beside = _address(self._orders if self.is_ordered else self._beside)
        addresses = (_address(self.data), _address(self.scales), beside, _address(self.row_scale))
        return PackedMatrixStruct(self.kind, self.group, self.n, self.k, *addresses, self.exact)

    @property
    def is_ordered(self) -> bool:
        """Returns whether the inputs of rows are reordered before the product."""
        return self.form in ORDERED.values()

    @property
    def form(self) -> int:
        """Returns ``kind`` without the part on activations, so that equal forms have the same layout of bytes."""
        return self.kind - A16 if is_weight_only(self.kind) else self.kind

    def with_bf16_rows(self) -> PackedWeight:
        """Returns the weight for rows that stay bfloat16; itself if its rows are floats already."""
        if self.kind == W8_OUTLIERS:
            return dataclasses.replace(self, kind=W8 + A16, table=None)
        return dataclasses.replace(self, kind=self.kind + A16) if self.kind in ROUNDED_ROWS else self

    def with_published_rows(self) -> PackedWeight:
        """Returns the weight for rows rounded to e4m3, if its checkpoint gives their scale; else itself."""
        has_scale = self.kind == E4M3_A16 and self.table is not None
        return dataclasses.replace(self, kind=E4M3_A8) if has_scale else self

    @property
    def _beside(self) -> Tensor | None:
        """Returns the tensor that the struct's ``mins`` points to."""
        return self.mins if self.table is None else self.table

    @cached_property
    def _orders(self) -> Tensor:
        """Returns what the struct's ``mins`` points to."""
        return orders.pointers(*self._order_rows, self.mins, PANEL)

    @property
    def _order_rows(self) -> tuple[Tensor, int]:
        """Returns the orders (orders, k), and how many rows have each."""
        assert self.table is not None
        found = self.table.view(-1, self.k)
        return found, -(-self.n // PANEL) * PANEL // len(found)

    @cached_property
    def exact(self) -> int:
        """Returns EXACT if sums over that many inputs are exact integers, and so the same in any order; else 0."""
        if self.kind != W4 or self.scales is None or self.mins is not None or EXACT % self.group:
            return 0
        scales = self.scales if self.scales.device.type == "cpu" else self.scales[:0]
        are_whole = bool((scales == scales.round()).all() and (scales.abs() <= WHOLE).all())
        return EXACT if are_whole and len(scales) else 0

    @cached_property
    def address(self) -> int:
        """Returns the address of ``struct``."""
        return ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that a matrix-vector product reads."""
        return sum(t.nbytes for t in (self.data, self.scales, self.mins, self.row_scale) if t is not None)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values that the kernels compute with, (n, k) in ``dtype``."""
        if self.kind == BF16:
            whole = from_steps(self.data.view(torch.bfloat16), 2, self.n, self.k).to(dtype)
            return whole if self.row_scale is None else whole * self.row_scale[: self.n, None].to(dtype)
        whole = self._narrow().to(dtype)
        if self.scales is not None:
            whole *= spread(self.scales, self.group, self.n, self.k).to(dtype)
        if self.mins is not None:
            whole -= spread(self.mins, self.group, self.n, self.k).to(dtype)
        assert self.row_scale is not None
        whole *= self.row_scale[: self.n, None].to(dtype)
        return self._in_plain_order(whole) if self.is_ordered else whole

    def _in_plain_order(self, whole: Tensor) -> Tensor:
        """Returns the columns (n, k) where their inputs lie."""
        found, each = self._order_rows
        placed = zip(whole.split(each), found.long(), strict=False)  # rows that fill a panel aren't there
        return torch.cat([torch.empty_like(part).index_copy_(1, order, part) for part, order in placed])

    def _narrow(self) -> Tensor:
        """Returns the numbers that scales multiply, (n, k)."""
        if self.kind in (E4M3, E4M3_A16, E4M3_A8):
            return from_steps(self.data.view(torch.float8_e4m3fn), 4, self.n, self.k)
        if self.form == CODES:
            return self._numbers[self.integers().int()]
        return self.integers()

    @property
    def _numbers(self) -> Tensor:
        """Returns the values of the codes: int8 for int8 rows, else bfloat16."""
        assert self.table is not None
        return self.table[:CODE_COUNT] if self.kind == CODES else self.table[CODE_COUNT:].view(torch.bfloat16)

    def integers(self) -> Tensor:
        """Returns the quantized integers without their zero point, or the codes, (n, k) int8."""
        data = self.data
        if self.form in (W4, W4_ORDERED, CODES):
            data = torch.stack((data.view(-1, PANEL, 4) & 15, data.view(-1, PANEL, 4) >> 4), 1)
        return (from_steps(data.reshape(-1), 4, self.n, self.k).to(torch.int16) - ZERO[self.form]).to(torch.int8)

    @cached_property
    def wide(self) -> Tensor:
        """Returns ``dequantized`` in float32, computed once, for machines without native code."""
        return self.dequantized()


def pack_bf16(weight: Tensor, row_scale: Tensor | None = None) -> PackedWeight:
    """Packs a weight (n, k) of any float dtype, rounded to bf16; row i is multiplied by ``row_scale[i]``,
    float32.
    """
    n, k = weight.shape
    data = in_steps(weight.to(torch.bfloat16), 2, padded(k, 0))
    scale = None if row_scale is None else whole_panels(row_scale.float())
    return PackedWeight(BF16, n, k, 0, data.view(torch.uint8), row_scale=scale)


def pack_e4m3(weight: Tensor, row_scale: Tensor, kind: int = E4M3) -> PackedWeight:
    """Packs a weight (n, k) float8_e4m3fn without rounding; row i is multiplied by ``row_scale[i]``, float32."""
    n, k = weight.shape
    data = in_steps(weight.view(torch.uint8), 4, padded(k, 0))
    return PackedWeight(kind, n, k, 0, data, row_scale=whole_panels(row_scale.float()))


def pack_e4m3_groups(weight: Tensor, group: int, scales: Tensor) -> PackedWeight:
    """Packs a weight (n, k) float8_e4m3fn for bf16 rows, with float32 ``scales`` (n, groups) of ``group`` inputs
    each.
    """
    n, k = weight.shape
    units = _units(scales)
    data = in_steps(weight.view(torch.uint8), 4, padded(k, group))
    parts = data, in_panels(scales / units[:, None]), None, whole_panels(units)
    return PackedWeight(E4M3_A16, n, k, group, *parts)


def pack_codes(
    codes: Tensor,
    table: Tensor,
    group: int,
    scales: Tensor,
    row_scale: Tensor | None = None,
    exact: Tensor | None = None,
) -> PackedWeight:
    """Packs codes (n, k) uint8 below 16; value = row_scale x scale x table[code].

    ``table`` are 16 int8, nearest to the 16 floats of ``exact`` (None: equal to them); ``scales`` float32 (n,
    groups) of ``group`` inputs each, a multiple of 16; ``row_scale`` float32 (n,). If it is given, float16 must
    hold the scales; else each row gets a power of two that makes them fit.
    """
    n, k = codes.shape
    assert group
    assert group % 16 == 0
    assert scales.shape == (n, padded(k, group) // group)
    units = _units(scales) if row_scale is None else row_scale.float()
    held = scales / units[:, None] if row_scale is None else scales
    data = nibbles(in_steps(codes, 4, padded(k, group)))
    parts = data, in_panels(held), None, whole_panels(units)
    wide = (table if exact is None else exact).to(torch.bfloat16).view(torch.int8)
    return PackedWeight(CODES, n, k, group, *parts, table=torch.cat((table.to(torch.int8), wide)))


def pack_integers(q: Tensor, bits: int, group: int, scales: Tensor, mins: Tensor | None = None) -> PackedWeight:
    """Packs ``q`` (n, k) int8 of ``bits`` bits (4: -8..7); value = scale x q - min.

    ``scales`` and ``mins`` are float32, (n, 1) for group 0, else (n, groups) with groups that cover k. ``group``
    must be a multiple of 16.
    """
    n, k = q.shape
    kind, steps = {8: W8, 4: W4}[bits], _steps_of(q, bits, group)
    assert scales.shape == (n, padded(k, group) // group if group else 1)
    if not group:
        assert mins is None
        return PackedWeight(kind, n, k, 0, steps, row_scale=whole_panels(scales[:, 0].float()))
    row_scale = _units(scales if mins is None else torch.cat((scales, mins), 1))
    lows = None if mins is None else in_panels(mins / row_scale[:, None])
    return PackedWeight(
        kind, n, k, group, steps, in_panels(scales / row_scale[:, None]), lows, whole_panels(row_scale)
    )


def beside(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """Returns weights of one shape concatenated as one, each starting at a panel; None if their forms differ."""
    if any(weight.is_ordered for weight in weights):
        weights = [_ordered(weight) for weight in weights]
    first = weights[0]
    rows = -(-first.n // PANEL) * PANEL * len(weights)
    if any(_form(w) != _form(first) for w in weights):
        return None
    table = first.table
    if first.is_ordered:
        table = orders.beside([w.table for w in weights if w.table is not None], first.k)
    elif first.kind == E4M3_A16 and table is not None:  # one scale of rows for all, which clips none
        table = torch.stack([w.table for w in weights if w.table is not None]).amax(0)
    elif table is not None and not all(torch.equal(table, w.table) for w in weights if w.table is not None):
        return None
    parts: dict[str, list[Any]] = {name: [getattr(w, name) for w in weights] for name in ROWS}
    whole: dict[str, Any] = {name: None if part[0] is None else torch.cat(part) for name, part in parts.items()}
    return dataclasses.replace(first, n=rows, table=table, **whole)


def _ordered(weight: PackedWeight) -> PackedWeight:
    """Returns a weight of integers whose inputs are in order as one whose table says so, others as they are."""
    if weight.form not in ORDERED:
        return weight
    kind = weight.kind - weight.form + ORDERED[weight.form]
    return dataclasses.replace(weight, kind=kind, table=torch.arange(weight.k, dtype=torch.int32))


def one_of(whole: PackedWeight, index: int, count: int, n: int) -> PackedWeight:
    """Returns the weight with index ``index`` of the ``count`` that ``beside`` put together; it has ``n`` rows."""
    names = (*ROWS, "table") if whole.is_ordered else ROWS
    parts: dict[str, Any] = {name: getattr(whole, name) for name in names}
    own: dict[str, Any] = {
        name: None if p is None else p.view(count, -1, *p.shape[1:])[index] for name, p in parts.items()
    }
    return dataclasses.replace(whole, n=n, **own)


def own_rows(whole: PackedWeight, ranges: Sequence[tuple[int, int]]) -> PackedWeight:
    """Returns a copy of the rows of ``whole`` in the ranges [begin, end), one range after the other."""
    rows = torch.cat([torch.arange(begin, end) for begin, end in ranges])
    n = len(rows)
    # what lies in a last panel behind its rows is never read
    at = F.pad(rows, (0, -n % PANEL), value=int(rows[-1]))
    panel, lane, panels = at // PANEL, at % PANEL, -(-n // PANEL)

    def scales(x: Tensor | None) -> Tensor | None:
        """Returns scales (panels, groups, 64) of the selected rows."""
        return None if x is None else x[panel, :, lane].view(panels, PANEL, -1).transpose(1, 2).contiguous()

    # every kind has 4 bytes of a row in a step
    steps = whole.data.view(-(-whole.n // PANEL), -1, PANEL, 4)[panel, :, lane]
    data = steps.view(panels, PANEL, -1, 4).transpose(1, 2).reshape(-1)
    row_scale = None if whole.row_scale is None else whole.row_scale[at].contiguous()
    kept = {"scales": scales(whole.scales), "mins": scales(whole.mins), "row_scale": row_scale}
    if whole.is_ordered and whole.table is not None:
        kept["table"] = orders.of_rows(whole.table, -(-whole.n // PANEL) * PANEL, at)
    return dataclasses.replace(whole, n=n, data=data.contiguous(), **kept)  # type: ignore[arg-type]


def _form(w: PackedWeight) -> tuple[int, int, int, int, bool, bool]:
    return w.kind, w.n, w.k, w.group, w.mins is None, w.table is None


def quantize(weight: Tensor, bits: int, group: int) -> PackedWeight:
    """Returns a weight (n, k) quantized symmetrically to ``bits`` (8 or 4), with a scale per row (group 0) or
    ``group`` inputs.

    8 bits: absmax / 127. 4 bits: the element of largest magnitude becomes -8 (as in GGUF's Q4_0) or a value near
    it, whichever has the least squared error. Scales of groups that divide EXACT are whole numbers up to WHOLE
    times one float32 per row.
    """
    n, k = weight.shape
    width = padded(k, group)
    parts = F.pad(weight.float(), (0, width - k)).view(n, -1, group or width)
    if bits == 4 and group and not EXACT % group:
        whole, unit = best_integer_scales(parts)
        q = rounded(parts, whole * unit, bits).view(n, width)[:, :k]
        return PackedWeight(
            W4, n, k, group, _steps_of(q, bits, group), in_panels(whole), row_scale=whole_panels(unit[:, 0])
        )
    scale = (parts.abs().amax(-1) / 127).clamp_min(TINY) if bits == 8 else best_scale(parts)
    packed_scale = scale if not group else as_stored(scale)
    return pack_integers(rounded(parts, packed_scale, bits).view(n, width)[:, :k], bits, group, packed_scale)


def padded(k: int, group: int) -> int:
    """Returns the number of inputs that the panels cover: ``k`` rounded up to a multiple of ``group``, or of 8 if
    that is 0.
    """
    step = group or 8
    return -(-k // step) * step


def _steps_of(q: Tensor, bits: int, group: int) -> Tensor:
    """Returns (n, k) int8 as panels of stored bytes, flat."""
    assert group % 16 == 0
    kind = {8: W8, 4: W4}[bits]
    stored = (q.to(torch.int16) + ZERO[kind]).to(torch.uint8)
    steps = in_steps(stored, 4, padded(q.shape[1], group), ZERO[kind])
    return steps if kind == W8 else nibbles(steps)


def _units(scales: Tensor) -> Tensor:
    """Returns, per row of scales (n, groups), the power of two by which float16 holds them best, (n,) float32."""
    peak = scales.abs().amax(1).double().clamp_min(2.0**-100)
    return torch.exp2(torch.floor(torch.log2(peak)) - 10).float()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
