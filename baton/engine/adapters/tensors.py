"""Reads a safetensors file without torch; the header is limited and checked before any tensor is read.

Knows nothing of adapters' layout. The format: u64 little-endian length, that many bytes of JSON, the tensors
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import os
import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.directory import PARAM, AdapterFiles
from baton.engine.adapters.pace import Pacing, no_pace
from baton.protos.errors import AdapterRefused
from baton.protos.json import Json

FILE = "adapter_model.safetensors"
MOST_HEADER = 32 << 20  # bytes; a header has 150 per tensor, and an adapter of all experts 200,000 tensors
SIZES = {"F32": 4, "F16": 2, "BF16": 2}
KINDS: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy dtypes; bf16 as its bits
_LENGTH = struct.Struct("<Q")


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor's entry in a safetensors header."""

    name: str
    dtype: str  # "F32", "F16" or "BF16"
    shape: tuple[int, ...]
    begin: int  # first byte, counted from the end of the header
    end: int  # byte after the last, counted likewise


class TensorFile:
    """The checked header of a safetensors file at path ``where``. ``entries`` has the tensors by name."""

    def __init__(self, where: str, entries: dict[str, TensorEntry], header: int) -> None:
        self.where, self.entries, self._data = where, entries, header

    def error(self, name: str, problem: str) -> AdapterRefused:
        """Returns an AdapterRefused error that names the file and tensor ``name`` and ends with ``problem``."""
        return AdapterRefused(f"{self.where}: tensor {name} {problem}", PARAM)

    def piece(self, descriptor: int, entry: TensorEntry, first: int, size: int) -> bytes:
        """Returns ``size`` bytes of one tensor from its byte ``first`` on. Raises AdapterRefused if the file was
        truncated meanwhile.
        """
        parts, at = [], self._data + entry.begin + first
        end = at + size
        while at < end:
            part = os.pread(descriptor, min(1 << 24, end - at), at)
            if not part:
                raise self.error(entry.name, "ends beyond the file, which was cut meanwhile")
            parts.append(part)
            at += len(part)
        return b"".join(parts)


def read_header(
    files: AdapterFiles, descriptor: int, size: int, most_tensors: int, pace: Pacing = no_pace
) -> TensorFile:
    """Returns the checked header of an open file of ``size`` bytes. Raises AdapterRefused naming the file and the
    tensor.

    It may have ``most_tensors`` tensors, all of them matrices, that cover the file without gaps. ``pace`` is called
    between short parts of the work.
    """
    where = f"{files.path}/{FILE}"
    length = _length(where, descriptor, size)
    try:
        found = msgspec.json.decode(os.pread(descriptor, length, _LENGTH.size), type=Json)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AdapterRefused(f"{where}: the header is no JSON object: {error}", PARAM) from None
    found.pop("__metadata__", None)
    if not 0 < len(found) <= most_tensors:
        text = f"this model has places for {most_tensors}"
        raise AdapterRefused(f"{where}: the header names {len(found)} tensors; {text}", PARAM)
    data = size - _LENGTH.size - length
    file = TensorFile(where, {}, _LENGTH.size + length)
    for name, raw in found.items():
        file.entries[name] = _entry(file, name, raw)
        pace()
    _require_covered(file, data)
    return file


def values(raw: bytes, dtype: str, width: int) -> NDArray[Any]:
    """Returns rows of ``width`` values: float32 for dtypes "F32" and "F16", the bits as uint16 for "BF16"."""
    found: NDArray[Any] = np.frombuffer(raw, KINDS[dtype]).reshape(-1, width)
    return found.astype(np.float32) if dtype == "F16" else found


def _length(where: str, descriptor: int, size: int) -> int:
    raw = os.pread(descriptor, _LENGTH.size, 0)
    length = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else -1
    if not 2 <= length <= min(MOST_HEADER, size - _LENGTH.size):
        text = f"({size} bytes) is no safetensors file: its header would have {length} bytes"
        raise AdapterRefused(f"{where} {text}", PARAM)
    return int(length)


def _entry(file: TensorFile, name: str, raw: object) -> TensorEntry:
    if not isinstance(raw, dict):
        raise file.error(name, "isn't described by an object")
    dtype = raw.get("dtype")
    if dtype not in SIZES:
        raise file.error(name, f"is of {dtype}; {', '.join(SIZES)} are read")
    shape, (begin, end) = (_two_numbers(file, name, raw, field) for field in ("shape", "data_offsets"))
    if end - begin != math.prod(shape) * SIZES[dtype] or not math.prod(shape):
        raise file.error(name, f"has shape {shape} of {dtype} in {end - begin} bytes")
    return TensorEntry(name, dtype, shape, begin, end)


def _two_numbers(file: TensorFile, name: str, raw: Json, field: str) -> tuple[int, int]:
    found = raw.get(field)
    if isinstance(found, list) and len(found) == 2 and all(type(x) is int and 0 <= x < 1 << 48 for x in found):
        return found[0], found[1]
    if name.endswith(".base_layer.bias"):
        text = "is a copy of a bias of the base's head or embedding, beside which adapters aren't applied"
        raise file.error(name, f"{text}; target other layers")
    if name.endswith(".bias"):
        raise file.error(name, "is a bias; biases of adapters aren't applied: train it without")
    raise file.error(name, f"has {field} {found}; two whole numbers are read: adapters are matrices")


def _require_covered(file: TensorFile, data: int) -> None:
    """Raises AdapterRefused unless the tensors lie side by side, from the first byte to the last."""
    at = 0
    for entry in sorted(file.entries.values(), key=lambda entry: entry.begin):
        if entry.begin != at:
            raise file.error(entry.name, f"begins at byte {entry.begin}; the tensor before ends at {at}")
        at = entry.end
    if at != data:
        raise AdapterRefused(
            f"{file.where}: tensors need {at} bytes, the file has {data}: it is cut or padded", PARAM
        )
