"""The structs of lora.h, and the packing of an adapter's second matrix for it. Torch-free.

Knows nothing of checkpoints. Matrices are numpy arrays: float32, or bf16 as uint16.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, F, NativeFunction, P

OP_LORA, OP_LM_HEAD_ADAPTED = 96, 97  # lora.h, lm_head/adapted.h: of a native step
PANEL = 64  # outputs of a panel of the second matrix
MOST_RANK = 256  # that the op takes
MOST_SITE_RANKS = 1024  # of all modules of a site together, on a GPU (rows.cuh)

Array = NDArray[np.generic]


class LoraPart(ctypes.Structure):
    """Mirrors LoraPart of lora.h."""

    _fields_ = [
        ("a", P),
        ("b", P),
        *((name, I64) for name in ("k", "first", "n")),
        *((name, I32) for name in ("rank", "dtype")),
        ("scale", F),
        ("looked_up", I32),
    ]


class LoraSite(ctypes.Structure):
    """Mirrors LoraSite of lora.h."""

    _fields_ = [("parts", P), ("count", I64)]


class LoraGroup(ctypes.Structure):
    """Mirrors LoraGroup of lora.h."""

    _fields_ = [("sites", P), ("rows", P), ("count", I64)]


class LoraStep(ctypes.Structure):
    """Mirrors LoraStep of lora.h."""

    _fields_ = [("groups", P), ("count", I64)]


class AdaptedHead(ctypes.Structure):
    """Mirrors AdaptedHead of lm_head/adapted.h."""

    _fields_ = [("lora", P), ("site", I64), ("softcap", F)]


def panelled(n: int) -> int:
    """Returns ``n`` outputs rounded up to a multiple of PANEL."""
    return -(-n // PANEL) * PANEL


def pack_b(b: Array, out: Array) -> None:
    """Writes ``b`` (n, rank) to ``out`` (n / 64 rounded up, rank, 64), with zeros as padding."""
    n, rank = b.shape
    whole = n // PANEL
    out[:whole] = b[: whole * PANEL].reshape(whole, PANEL, rank).transpose(0, 2, 1)
    if n % PANEL:
        out[whole] = 0
        out[whole, :, : n % PANEL] = b[whole * PANEL :].T


def unpack_b(packed: Array, n: int) -> Array:
    """Returns what ``pack_b`` wrote to ``packed``, as (n, rank)."""
    panels, rank, _ = packed.shape
    return packed.transpose(0, 2, 1).reshape(panels * PANEL, rank)[:n]


@cache
def run_lora() -> NativeFunction:
    """Returns baton_lora(groups, count, site, x, x_stride, tokens, out, out_stride).

    Raises RuntimeError if there is no native library.
    """
    return native.function("lora", P, I64, I64, P, I64, P, P, I64)
