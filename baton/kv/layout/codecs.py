"""Converts KV values between float dtypes, and into 8 bits with one scale per (token, head). Torch-free.

Knows nothing of pages' owners, frames or negotiation (bridge.py). An array's last axis is one head of one token of
one plane of one layer. int8 rounds x / scale to -127..127 with scale = max|x| / 127; fp8 is E4M3 (no infinities,
largest 448; OCP 8-bit Floating Point Specification 1.0) of x / scale with scale = max|x| / 448.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ByteArray = NDArray[np.uint8]

SCALE_BYTES = 4  # bytes of a scale, a float32
INT8_MAX, FP8_MAX = 127.0, 448.0  # the largest value that each code holds


class Codec(NamedTuple):
    """Codes scaled float rows as one byte per value (``encode``) and back (``decode``)."""

    peak: float  # the largest magnitude that a code can represent
    encode: Callable[[Floats], ByteArray]
    decode: Callable[[ByteArray], Floats]


def to_float32(data: memoryview, dtype: str) -> Floats:
    """Returns ``data``, values of a layout's ``dtype``, as a flat float32 array, without a copy if they are
    float32.
    """
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(dtype)).astype(np.float32, copy=False)


def from_float32(values: Floats, dtype: str) -> NDArray[np.uint16 | np.float16 | np.float32]:
    """Returns ``values`` in ``dtype`` (bfloat16 as uint16 bits), rounded to nearest even; values beyond float16's
    range are clipped to it.
    """
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "float16":
        return np.clip(values, -65504.0, 65504.0).astype(np.float16)
    return np.ascontiguousarray(values, np.dtype(dtype))


def compress(rows: Floats, codec: Codec) -> tuple[Floats, ByteArray]:
    """Quantizes ``rows`` (n, head_dim); returns n float32 scales and the codes, (n, head_dim) uint8."""
    scales = np.max(np.abs(rows), axis=1) / np.float32(codec.peak)
    scales[scales == 0] = 1.0
    return scales.astype(np.float32), codec.encode(rows / scales[:, None])


def expand(scales: Floats, coded: ByteArray, codec: Codec) -> Floats:
    """Returns float32 rows (n, head_dim), approximately those that were given to ``compress``, from ``scales`` (n)
    and ``coded`` (n, head_dim).
    """
    return codec.decode(coded) * scales[:, None]


def _int8(values: Floats) -> ByteArray:
    return np.rint(np.clip(values, -INT8_MAX, INT8_MAX)).astype(np.int8).view(np.uint8)


def _from_int8(coded: ByteArray) -> Floats:
    return coded.view(np.int8).astype(np.float32)


def _fp8(values: Floats) -> ByteArray:
    """Scaling by 2^-120 moves E4M3's exponent (bias 7) onto float32's (bias 127), subnormals included."""
    size = np.minimum(np.abs(values), np.float32(FP8_MAX)) * np.float32(2.0**-120)
    bits = size.view(np.uint32)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return (rounded | (np.signbit(values) * np.uint32(0x80))).astype(np.uint8)


def _e4m3(code: int) -> float:
    """Returns the value of one code, by the specification."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_FP8_VALUES = np.array([_e4m3(code) for code in range(256)], np.float32)


def _from_fp8(coded: ByteArray) -> Floats:
    return _FP8_VALUES[coded]


CODECS = {"int8": Codec(INT8_MAX, _int8, _from_int8), "fp8": Codec(FP8_MAX, _fp8, _from_fp8)}
