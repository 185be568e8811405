"""Holds what a timed call computed against a plain way to the same result. Knows nothing of ops.

A figure of a wrong result is none: its row has no value and says by how much it is off.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from bench.cuda import clock
from bench.cuda.clock import Call
from bench.cuda.rows import Row

EXACT, FLOAT, ROUNDED, NARROW = 0.0, 1e-4, 1e-2, 4e-2  # of float32 sums, of bf16 operands, of 8 and 4 bits


def off(found: Tensor, wanted: Tensor) -> float:
    """Returns ‖found - wanted‖ / ‖wanted‖ in float64, infinity where a number of ``found`` is none."""
    mine, theirs = found.double().to(wanted.device), wanted.double()
    if not bool(torch.isfinite(mine).all()):
        return float("inf")
    return float((mine - theirs).norm() / theirs.norm().clamp_min(1e-300))


def error_of(call: Call, out: Tensor, wanted: Callable[[], Tensor]) -> float:
    """Returns how far off ``call`` leaves ``out``, which is poisoned before; what it never writes is NaN."""
    poison(out)
    call()
    clock.wait()
    return off(out, wanted())


def poison(out: Tensor) -> None:
    """Fills ``out`` with NaN, or integers with their largest number."""
    out.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).max)
    clock.wait()


def judged(row: Row, error: float, most: float) -> Row:
    """Returns ``row`` with its error; without a figure where that is above ``most``."""
    if error <= most:
        return msgspec.structs.replace(row, error=error)
    said = f"WRONG: off by {error:.1e}, at most {most:.0e}"
    return msgspec.structs.replace(row, value=None, ratio=None, said=said, error=error)
