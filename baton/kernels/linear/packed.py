"""Weights in the panels that native linear reads (linear.h draws them), and back. Knows nothing of checkpoints.

    rows n -> panels of 64;  a panel = steps over k;  a step = 64 rows x 2 (bf16), 4 (W8) or 8 (W4) inputs

The same bytes serve every ISA. Scales are kept as float16 times a power of two per row, so that scales which a
checkpoint gives as float16 stay exact and small ones don't underflow.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL = 64
BF16, W8, W4 = 0, 1, 2  # linear.h: LinearKind
E4M3 = 3  # form.cuh: of a GPU alone, elsewhere the reference computes it
ZERO = {W8: 128, W4: 8}
VERSION = 1  # of this layout: part of the name of what is cached on disk
REACHES = (-8.0, -7.6, -7.2, -6.8, 7.4, 7.0)  # what a group's largest element may become
_CACHED = 1 << 17  # elements rounded at a time: they stay in the cache
_TOP = 2.0**10  # where a row's largest scale is brought to: float16 then spans 24 octaves below it


class Struct(ctypes.Structure):
    """linear.h: PackedLinear."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("mins", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
    ]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight (n, k). ``data`` uint8, panels in order; ``scales``, ``mins`` float16 (panels, groups, 64) or None;
    ``row_scale`` float32 (panels x 64), None for plain bf16. ``group`` 0: one scale per row.
    """

    kind: int
    n: int
    k: int
    group: int
    data: Tensor
    scales: Tensor | None = None
    mins: Tensor | None = None
    row_scale: Tensor | None = None
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (self.n, self.k))

    @cached_property
    def struct(self) -> Struct:
        """What native code takes; valid as long as this object lives."""
        tensors = (self.data, self.scales, self.mins, self.row_scale)
        return Struct(
            self.kind, self.group, self.n, self.k, *(None if t is None else t.data_ptr() for t in tensors)
        )

    @cached_property
    def address(self) -> int:
        """Of ``struct``."""
        return ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        """What a matrix-vector product reads."""
        return sum(t.nbytes for t in (self.data, self.scales, self.mins, self.row_scale) if t is not None)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values that the kernels compute with, (n, k)."""
        if self.kind == BF16:
            whole = _from_steps(self.data.view(torch.bfloat16), 2, self.n, self.k).to(dtype)
            return whole if self.row_scale is None else whole * self.row_scale[: self.n, None].to(dtype)
        if self.kind == E4M3:
            assert self.row_scale is not None
            whole = _from_steps(self.data.view(torch.float8_e4m3fn), 4, self.n, self.k).to(dtype)
            return whole * self.row_scale[: self.n, None].to(dtype)
        whole = self.integers().to(dtype)
        if self.scales is not None:
            whole *= _spread(self.scales, self.group, self.n, self.k).to(dtype)
        if self.mins is not None:
            whole -= _spread(self.mins, self.group, self.n, self.k).to(dtype)
        assert self.row_scale is not None
        return whole * self.row_scale[: self.n, None].to(dtype)

    def integers(self) -> Tensor:
        """The quantized integers without their zero, (n, k) int8."""
        data = self.data
        if self.kind == W4:
            data = torch.stack((data.view(-1, PANEL, 4) & 15, data.view(-1, PANEL, 4) >> 4), 1)
        return (_from_steps(data.reshape(-1), 4, self.n, self.k).to(torch.int16) - ZERO[self.kind]).to(torch.int8)

    @cached_property
    def wide(self) -> Tensor:
        """``dequantized`` in float32, kept: for machines without native code."""
        return self.dequantized()


def pack_bf16(weight: Tensor, row_scale: Tensor | None = None) -> PackedWeight:
    """(n, k) of any float dtype, rounded to bf16; each row times ``row_scale`` (n,), which stays float32."""
    n, k = weight.shape
    data = _to_steps(weight.to(torch.bfloat16), 2, padded(k, 0))
    scale = None if row_scale is None else _rows(row_scale.float())
    return PackedWeight(BF16, n, k, 0, data.view(torch.uint8), row_scale=scale)


def pack_e4m3(weight: Tensor, row_scale: Tensor) -> PackedWeight:
    """(n, k) float8_e4m3fn, as stored, each row times ``row_scale`` (n,) float32."""
    n, k = weight.shape
    data = _to_steps(weight.view(torch.uint8), 4, padded(k, 0))
    return PackedWeight(E4M3, n, k, 0, data, row_scale=_rows(row_scale.float()))


def pack_integers(q: Tensor, bits: int, group: int, scales: Tensor, mins: Tensor | None = None) -> PackedWeight:
    """q (n, k) int8 of ``bits`` (4: -8..7), float32 scales (n, 1) for group 0, else (n, groups), groups covering k.

    value = scale x q - min. A multiple of 16 is needed of ``group``.
    """
    n, k = q.shape
    kind, width = {8: W8, 4: W4}[bits], padded(k, group)
    assert group % 16 == 0
    assert scales.shape == (n, width // group if group else 1)
    steps = _to_steps((q.to(torch.int16) + ZERO[kind]).to(torch.uint8), 4, width, ZERO[kind])
    if kind == W4:
        pairs = steps.view(-1, 2, PANEL * 4)
        steps = (pairs[:, 0] | (pairs[:, 1] << 4)).reshape(-1)
    if not group:
        assert mins is None
        return PackedWeight(kind, n, k, 0, steps, row_scale=_rows(scales[:, 0].float()))
    peak = scales.abs().amax(1) if mins is None else torch.maximum(scales.abs().amax(1), mins.abs().amax(1))
    row_scale = torch.exp2(torch.floor(torch.log2(peak.double().clamp_min(2.0**-100))) - 10).float()
    lows = None if mins is None else _panels(mins / row_scale[:, None])
    return PackedWeight(kind, n, k, group, steps, _panels(scales / row_scale[:, None]), lows, _rows(row_scale))


def quantize(weight: Tensor, bits: int, group: int) -> PackedWeight:
    """Round (n, k) to ``bits`` (8 or 4), symmetric, one scale per row (group 0) or per ``group`` inputs.

    8 bits: absmax / 127. 4 bits: the element of largest magnitude becomes -8 (as GGUF's Q4_0), then the scale is
    chosen among shrunk ones by least squared error.
    """
    n, k = weight.shape
    width = padded(k, group)
    parts = F.pad(weight.float(), (0, width - k)).view(n, -1, group or width)
    scale = (parts.abs().amax(-1) / 127).clamp_min(1e-30) if bits == 8 else _best_scale(parts)
    packed_scale = scale if not group else _as_stored(scale)
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    q = torch.round(parts / packed_scale[..., None]).clamp_(low, high).to(torch.int8)
    return pack_integers(q.view(n, width)[:, :k], bits, group, packed_scale)


def padded(k: int, group: int) -> int:
    """Inputs that the panels cover."""
    step = group or 8
    return -(-k // step) * step


def _best_scale(parts: Tensor) -> Tensor:
    """(n, groups): of the scales that bring the largest element to -8, or near, the one of least squared error."""
    rows = max(1, _CACHED // (parts.shape[1] * parts.shape[2]))
    return torch.cat([_best_of_rows(some) for some in parts.split(rows)])


def _best_of_rows(parts: Tensor) -> Tensor:
    low, high = parts.amin(-1), parts.amax(-1)
    peak = torch.where(-low > high, low, high)
    best, error = torch.full_like(peak, 1e-30), torch.full_like(peak, torch.inf)
    for reach in REACHES:
        scale = peak / reach
        scale = torch.where(scale.abs() < 1e-30, 1e-30, scale)
        wide = scale[..., None]
        off = (parts / wide).round_().clamp_(-8, 7).mul_(wide).sub_(parts).square_().sum(-1)
        better = off < error
        best, error = torch.where(better, scale, best), torch.where(better, off, error)
    return best


def _as_stored(scale: Tensor) -> Tensor:
    """Scales as float16 will hold them, so that rounding the weights sees the final ones."""
    peak = torch.exp2(torch.floor(torch.log2(scale.abs().amax(1, keepdim=True).clamp_min(2.0**-100))))
    rounded = (scale / peak * _TOP).half().float() * peak / _TOP
    return torch.where(rounded == 0, torch.full_like(rounded, 1e-30), rounded)


def _to_steps(x: Tensor, step: int, width: int, fill: int = 0) -> Tensor:
    """(n, k) -> [panel][width / step][64][step], flat."""
    n, k = x.shape
    panels = -(-n // PANEL)
    out = torch.full((panels * PANEL, width), fill, dtype=x.dtype)
    out[:n, :k] = x
    return out.view(panels, PANEL, width // step, step).transpose(1, 2).reshape(-1)


def _from_steps(x: Tensor, step: int, n: int, k: int) -> Tensor:
    panels = -(-n // PANEL)
    return x.view(panels, -1, PANEL, step).transpose(1, 2).reshape(panels * PANEL, -1)[:n, :k]


def _panels(x: Tensor) -> Tensor:
    """(n, groups) float32 -> (panels, groups, 64) float16."""
    return F.pad(x, (0, 0, 0, -len(x) % PANEL)).view(-1, PANEL, x.shape[1]).transpose(1, 2).half().contiguous()


def _rows(x: Tensor) -> Tensor:
    return F.pad(x, (0, -len(x) % PANEL)).contiguous()


def _spread(x: Tensor, group: int, n: int, k: int) -> Tensor:
    """(panels, groups, 64) -> (n, k)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])[:n].repeat_interleave(group, 1)[:, :k]
