"""Caches packed weights on disk: written once per (checkpoint, scheme, layout), mapped into memory by every later
start.

Knows nothing of how weights are quantized. One file: magic, length and checksum of the header, the header (JSON:
per weight its kind, sizes and parts, each with offset, shape, dtype and checksum), then the parts at multiples of
64 bytes. Checksums are xxh3-64. A damaged file is replaced. The layout is the same for every ISA, so the name has
only its version. Workers that start together take a lock: one writes, the others map.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
import xxhash
from torch import Tensor

from baton.engine.checkpoints.file_lock import locked
from baton.kernels.linear.packed import VERSION, PackedWeight
from baton.places import cache_dir

log = logging.getLogger("baton.engine")

MAGIC = b"BATONPW1"
PREFIX = 24  # magic, header bytes, header checksum
ALIGN = 64  # bytes at whose multiples tensors begin in the file
PARTS = ("data", "scales", "mins", "row_scale", "table")
DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "float16": torch.float16,
    "float32": torch.float32,
}


class PackedTensor(msgspec.Struct, frozen=True):
    """Locates a tensor in the file."""

    offset: int  # bytes from the file's beginning
    shape: tuple[int, ...]
    dtype: str  # one of DTYPES
    checksum: int  # xxh3-64 of its bytes


class WeightEntry(msgspec.Struct, frozen=True):
    """Describes a ``PackedWeight`` in the file's header."""

    kind: int  # ``PackedWeight.kind``
    n: int
    k: int
    group: int  # inputs per scale; 0 for one per row
    parts: dict[str, PackedTensor]  # by field of ``PackedWeight``


class CacheDamaged(Exception):
    """Is raised if a cache file's header or a tensor differs from what was written."""


def packed_weights(
    fingerprint: str, scheme: str, make: Callable[[], dict[str, PackedWeight]], directory: str = ""
) -> dict[str, PackedWeight]:
    """Returns the packed weights of checkpoint ``fingerprint`` in ``scheme``, by name: from the cache file, or made
    by ``make`` and cached.

    ``directory`` is the cache's, empty for the default. If the cache can't be written, they are made each time.
    """
    path = Path(directory or cache_dir()) / "weights" / f"{fingerprint[:32]}-{scheme}-v{VERSION}.baton"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), f"packing weights for {path}"):
            found = _read_or_none(path)
            if found is None:
                _write(path, make())
                found = read(path)
            return found
    except OSError as error:
        log.warning("packed weights are not cached: %s", error)
        return make()


def read(path: Path) -> dict[str, PackedWeight]:
    """Maps a cache file copy-on-write and returns its weights by name. Raises CacheDamaged or OSError."""
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    size, checksum = (int.from_bytes(whole[at : at + 8], "little") for at in (8, 16))
    header = whole[PREFIX : PREFIX + size]
    if whole[:8] != MAGIC or xxhash.xxh3_64_intdigest(header) != checksum:
        raise CacheDamaged(f"{path}: the header is not what was written")
    entries = msgspec.json.decode(header, type=dict[str, WeightEntry])
    return {name: _mapped(whole, entry, f"{path}: {name}") for name, entry in entries.items()}


def _mapped(whole: mmap.mmap, entry: WeightEntry, what: str) -> PackedWeight:
    parts = {name: _tensor(whole, part, f"{what}.{name}") for name, part in entry.parts.items()}
    return PackedWeight(entry.kind, entry.n, entry.k, entry.group, **parts)


def _tensor(whole: mmap.mmap, part: PackedTensor, what: str) -> Tensor:
    dtype = DTYPES[part.dtype]
    count = torch.Size(part.shape).numel()
    if part.offset + count * dtype.itemsize > len(whole):
        raise CacheDamaged(f"{what} is cut off")
    found = torch.frombuffer(whole, dtype=dtype, count=count, offset=part.offset)
    if xxhash.xxh3_64_intdigest(found.numpy().data) != part.checksum:
        raise CacheDamaged(f"{what} has another checksum than when it was written")
    return found.view(part.shape)


def _read_or_none(path: Path) -> dict[str, PackedWeight] | None:
    try:
        return read(path) if path.exists() else None
    except (CacheDamaged, ValueError, msgspec.MsgspecError) as error:
        log.warning("packed weights are made again: %s", error)
        return None


def _write(path: Path, weights: dict[str, PackedWeight]) -> None:
    """Writes the file atomically; the first pass computes offsets and checksums, the second writes."""
    entries, at = {}, 0
    for name, weight in weights.items():
        parts: dict[str, PackedTensor] = {}
        for part, tensor in _parts(weight):
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts[part] = PackedTensor(at, tuple(tensor.shape), dtype, xxhash.xxh3_64_intdigest(raw))
            at = _up(at + tensor.nbytes)
        entries[name] = WeightEntry(weight.kind, weight.n, weight.k, weight.group, parts)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    try:
        with os.fdopen(handle, "wb") as file:
            _fill(file, entries, weights)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _fill(file: BinaryIO, entries: dict[str, WeightEntry], weights: dict[str, PackedWeight]) -> None:
    base = _up(PREFIX + len(msgspec.json.encode(entries)) + 32 * sum(len(e.parts) for e in entries.values()))
    moved = {name: _moved(entry, base) for name, entry in entries.items()}
    header = msgspec.json.encode(moved)
    file.write(MAGIC + len(header).to_bytes(8, "little") + xxhash.xxh3_64_digest(header)[::-1] + header)
    for name, weight in weights.items():
        for part, tensor in _parts(weight):
            file.seek(moved[name].parts[part].offset)
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    file.truncate(max(file.tell(), base))


def _moved(entry: WeightEntry, base: int) -> WeightEntry:
    parts = {name: msgspec.structs.replace(part, offset=part.offset + base) for name, part in entry.parts.items()}
    return msgspec.structs.replace(entry, parts=parts)


def _parts(weight: PackedWeight) -> Iterator[tuple[str, Tensor]]:
    for name in PARTS:
        tensor = getattr(weight, name)
        if tensor is not None:
            yield name, tensor


def _up(at: int) -> int:
    return -(-at // ALIGN) * ALIGN
