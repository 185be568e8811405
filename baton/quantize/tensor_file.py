"""Writes a safetensors file tensor by tensor and piece by piece, so that none is held in memory whole.

Knows nothing of what the tensors are. Source: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8",
}  # fmt: skip
ALIGNED = 8  # bytes by which the header's length divides


class PiecewiseTensor(NamedTuple):
    """A tensor as pieces of neighbouring rows, in their order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]


def whole(tensor: Tensor) -> PiecewiseTensor:
    """Returns a tensor as its only piece."""
    return PiecewiseTensor(tensor.dtype, tuple(tensor.shape), (tensor,))


def write_tensors(path: Path, tensors: Mapping[str, PiecewiseTensor]) -> None:
    """Writes a safetensors file with ``tensors`` by name; wide dtypes come first, so that each is aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape, _ = tensors[name]
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            size = sum(file.write(_bytes(piece)) for piece in tensors[name].pieces)
            first, last = header[name]["data_offsets"]  # type: ignore[index]
            assert size == last - first, f"{name}: its pieces have {size} bytes, its shape {last - first}"


def _bytes(piece: Tensor) -> memoryview:
    return piece.contiguous().flatten().view(torch.uint8).numpy().data
