"""Compares the copies of a base's embedding and head, which PEFT saves with adapters of these, with the base's.

Knows nothing of adapters' matrices. An adapter with such a copy is accepted only if the copy equals the
base's table: if that was resized or trained, the adapter belongs to another base.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.tensors import KINDS, SIZES, TensorEntry, TensorFile
from baton.engine.program.spellings import spellings
from baton.protos.json import Json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 1 << 16  # elements compared at a time, a fraction of a millisecond's work; a table may not fit into memory
REMEDY = "save the adapter with save_embedding_layers=False"


class BaseTable:
    """Reads one tensor of a base's checkpoint in pieces. It is a context manager that closes the file."""

    def __init__(self, path: Path, entry: Json, data: int) -> None:
        self.dtype, self.shape = str(entry["dtype"]), tuple(entry["shape"])
        self._begin = data + int(entry["data_offsets"][0])
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> BaseTable:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, at: int, count: int) -> NDArray[np.float32]:
        """Returns the ``count`` elements from index ``at`` on of the flattened tensor, as float32."""
        size = SIZES[self.dtype]
        return as_float(os.pread(self._file, count * size, self._begin + at * size), self.dtype)


def require_same(
    file: TensorFile, descriptor: int, entry: TensorEntry, module: str, model: str, pace: Callable[[], None]
) -> None:
    """Raises AdapterRefused unless tensor ``entry`` equals the table of ``module`` in the checkpoint in folder
    ``model``.

    ``pace`` is called between short parts of the work.
    """
    table = _table(Path(model), module) if model else None
    if table is None:
        raise file.error(entry.name, f"is a copy of the base's table, which can't be compared here; {REMEDY}")
    with table:
        if table.dtype not in SIZES or table.shape != entry.shape:
            text = f"has shape {entry.shape}, the base's table has {table.shape}: it was trained on another base"
            raise file.error(entry.name, text)
        size, count = SIZES[entry.dtype], entry.shape[0] * entry.shape[1]
        for at in range(0, count, PIECE):
            pace()
            some = min(PIECE, count - at)
            raw = file.piece(descriptor, entry, at * size, some * size)
            if not np.array_equal(as_float(raw, entry.dtype), table.read(at, some)):
                raise file.error(entry.name, "isn't the base's table: the adapter was trained with another one")


def as_float(raw: bytes, dtype: str) -> NDArray[np.float32]:
    """Returns the elements of ``raw``, bytes of safetensors dtype "F32", "F16" or "BF16", as float32."""
    found: NDArray[np.generic] = np.frombuffer(raw, KINDS[dtype])
    return (found.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else found.astype(np.float32)


def _table(model: Path, module: str) -> BaseTable | None:
    """Returns the module's table, or the embedding's if the head has none of its own; None if there is neither."""
    for name in (*spellings(f"{module}.weight"), *spellings("model.embed_tokens.weight")):
        path = _file_of(model, name)
        if path is not None and path.is_file():
            header, data = _header(path)
            if name in header:
                return BaseTable(path, header[name], data)
    return None


def _file_of(model: Path, name: str) -> Path | None:
    index = model / INDEX
    if not index.is_file():
        return model / SINGLE
    file = msgspec.json.decode(index.read_bytes(), type=Json).get("weight_map", {}).get(name)
    return None if file is None else model / str(file)


def _header(path: Path) -> tuple[Json, int]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return msgspec.json.decode(file.read(length), type=Json), 8 + length
