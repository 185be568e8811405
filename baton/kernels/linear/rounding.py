"""Rounds weights to integers, with the scales of groups and rows that have the least squared error.

Knows nothing of panels. Scales for groups of 4 bits are whole numbers times a float32 per row (as in QServe,
https://arxiv.org/abs/2405.04532): times their scales the weights then fit 8 bits, and sums need no conversion from
group to group. The error compared with float16 scales is about 1% more for groups of 32, 3% less for groups of 128.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

WHOLE = 15  # the largest scale that counts as whole
EXACT = 1024  # inputs whose products of 8 x WHOLE and 127 add up to less than 2^24, exact in float32
REACHES = (-8.0, -7.4, -6.8, 7.2)  # the values that a group's largest element may become
UNITS = (0.87, 0.95, 1.03)  # shares of WHOLE that the scale of the row's largest element may be, at -8
TINY = 1e-30  # the scale of a group of zeros, because 0 can't be divided by
_CACHED = 1 << 17  # elements rounded at a time, because they stay in the cache
_TOP = 2.0**10  # what a row's largest scale is brought to, because float16 then spans 24 octaves below it


def rounded(parts: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Returns ``parts`` (n, groups, group) divided by ``scale`` (n, groups) and rounded, as int8."""
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    return torch.round(parts / scale[..., None]).clamp_(low, high).to(torch.int8)


def best_scale(parts: Tensor) -> Tensor:
    """Returns 4-bit scales (n, groups) that map each group's largest element to -8 or near, with the least squared
    error.
    """
    return torch.cat([_best_of(some, (_not_tiny(_peaks(some) / r) for r in REACHES))[0] for some in _near(parts)])


def best_integer_scales(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 4-bit scales as whole numbers (n, groups) and a unit (n, 1) to multiply them by, with the least
    squared error.
    """
    found = [_best_whole_of(some) for some in _near(parts)]
    return torch.cat([whole for whole, _ in found]), torch.cat([unit for _, unit in found])


def _best_whole_of(parts: Tensor) -> tuple[Tensor, Tensor]:
    peaks = _peaks(parts)
    largest = (peaks.abs().amax(1, keepdim=True) / 8).clamp_min(TINY)
    best = torch.ones_like(peaks)
    best_unit, error = largest, torch.full_like(largest, torch.inf)
    for share in UNITS:
        unit = largest * (share / WHOLE)
        scale, off = _best_of(parts, (_whole(peaks / (reach * unit)) * unit for reach in REACHES))
        off = off.sum(1, keepdim=True)
        better = off < error
        best, best_unit = torch.where(better, torch.round(scale / unit), best), torch.where(better, unit, best_unit)
        error = torch.where(better, off, error)
    return best, best_unit


def _best_of(parts: Tensor, scales: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns, of several 4-bit scales (n, groups), those of least squared error, and that error."""
    best = error = parts.new_full(parts.shape[:2], torch.inf)
    for scale in scales:
        wide = scale[..., None]
        off = (parts / wide).round_().clamp_(-8, 7).mul_(wide).sub_(parts).square_().sum(-1)
        better = off < error
        best, error = torch.where(better, scale, best), torch.where(better, off, error)
    return best, error


def _near(parts: Tensor) -> tuple[Tensor, ...]:
    """Returns ``parts`` split into a few rows at a time."""
    return parts.split(max(1, _CACHED // (parts.shape[1] * parts.shape[2])))


def _peaks(parts: Tensor) -> Tensor:
    """Returns each group's element of largest magnitude, with its sign."""
    low, high = parts.amin(-1), parts.amax(-1)
    return torch.where(-low > high, low, high)


def _whole(scale: Tensor) -> Tensor:
    """Returns ``scale`` rounded to whole numbers with magnitudes from 1 to WHOLE."""
    return torch.where(scale < 0, -1.0, 1.0) * scale.abs().round().clamp_(1, WHOLE)


def _not_tiny(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() < TINY, TINY, scale)


def as_stored(scale: Tensor) -> Tensor:
    """Returns ``scale`` (n, groups) as float16 times a power of two per row will hold it, for rounding weights by
    it.
    """
    peak = torch.exp2(torch.floor(torch.log2(scale.abs().amax(1, keepdim=True).clamp_min(2.0**-100))))
    stored = (scale / peak * _TOP).half().float() * peak / _TOP
    return torch.where(stored == 0, torch.full_like(stored, TINY), stored)
