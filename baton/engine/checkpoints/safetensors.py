"""Reads a checkpoint's safetensors files by mmap: finds tensors by name, and computes a fingerprint of them all.

Knows nothing of architectures: it is asked for named, shaped tensors. Every failure is a CheckpointError that names
the file. Pickled weights (``.bin``, ``.pt``) are never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.checkpoints.content_hashes import content_hashes, identity
from baton.engine.program import spellings
from baton.engine.program.program import Weight
from baton.engine.program.rank_program import Rows
from baton.engine.program.spellings import OTHER_PREFIXES, PREFIX
from baton.engine.program.stacked import own_source, part_of, stacked_source
from baton.protos.errors import CheckpointError
from baton.protos.json import Json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD, OTHER_HEAD, TABLE = f"{spellings.HEAD}.weight", f"{spellings.OTHER_HEAD}.weight", "embed_tokens.weight"
# Of encoders: tables that identify them, prefixes that files may have, and older names of norms' weights.
ENCODER_TABLES = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
ENCODER_PREFIXES = ("bert.", "roberta.", "model.")
OLD_NORMS = {".gamma": ".weight", ".beta": ".bias"}
WHOLE_BYTES = 256 << 20  # of files together, up to which their bytes are hashed at each start
HEADER_BYTES = 8  # at a file's beginning: the size of its header

Hashes = Callable[[Path, dict[str, tuple[int, int]]], dict[str, str]]  # of a file's ranges: first byte, size
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # dtypes as a file's header names them


class Checkpoint:
    """Reads the tensors of one directory, whatever files they are spread over. Raises CheckpointError."""

    def __init__(self, directory: Path) -> None:
        self._files = _files(directory)
        paths = sorted(set(self._files.values()))
        self._mapped = {path: identity(path) for path in paths if path.exists()}  # before each is mapped
        self._handles = {path: _open(path) for path in paths}
        self._read_from: set[Path] = set()  # files of which tensors were read since the last ``release``
        self._own: dict[str, str] = {}  # the files' names of tensors by those that programs use
        for path, handle in self._handles.items():
            found = set(handle.keys())
            missing = next((name for name, at in self._files.items() if at == path and name not in found), None)
            if missing:
                raise CheckpointError(f"{path}: tensor {missing} is missing, though {INDEX} names it", "model")
            self._files |= dict.fromkeys(found - set(self._files), path)
        if any(f"{at}{TABLE}" in self._files for at in OTHER_PREFIXES):
            self._name_as_causal_models_do()
        for table in ENCODER_TABLES:
            self._name_as_encoders_do(table)

    def _name_as_causal_models_do(self) -> None:
        """Makes the tensors of a model without a head (Qwen3-Embedding), or inside a larger one (Gemma 3),
        available by the causal model's names. The embedding table stands in for a missing head.
        """
        at = next(at for at in OTHER_PREFIXES if f"{at}{TABLE}" in self._files)
        self._own = {f"{PREFIX}{name.removeprefix(at)}": name for name in self._files if name.startswith(at)}
        head = OTHER_HEAD if OTHER_HEAD in self._files else f"{at}{TABLE}"
        self._own |= {} if HEAD in self._files else {HEAD: head}
        self._files |= {name: self._files[own] for name, own in self._own.items()}

    def _name_as_encoders_do(self, table: str) -> None:
        """Makes the tensors of an encoder inside a larger model, or in an old file, available by the encoder's own
        names.
        """
        prefix = next((at for at in ("", *ENCODER_PREFIXES) if f"{at}{table}" in self._files), None)
        if prefix is None:
            return
        for name in tuple(self._files):
            known = name.removeprefix(prefix)
            for old, new in OLD_NORMS.items():
                known = f"{known.removesuffix(old)}{new}" if known.endswith(old) else known
            if known != name:
                self._own[known], self._files[known] = name, self._files[name]

    def weights(
        self, wanted: Iterable[Weight], dtype: torch.dtype, device: str, own: Mapping[str, Rows] | None = None
    ) -> dict[str, Tensor]:
        """Returns each weight of ``wanted`` in ``dtype`` by name, its sources stacked. Of those in ``own`` only the
        given rows are read, and stay on the CPU; the others are put on ``device``.

        Weights that are changed on load, or exact, are float32. Raises CheckpointError for a tensor that is missing
        or has another shape.
        """
        rows = own or {}
        return {
            weight.name: self._stack_rows(weight, dtype, rows[weight.name])
            if weight.name in rows
            else self._stack(weight, dtype).to(device)
            for weight in wanted
        }

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""
        return self._files.keys()

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Returns one tensor as it is stored; with ``shape``, it must have that shape and be of floats. Raises
        CheckpointError.
        """
        return self._read(name, shape)

    def rows(self, name: str, shape: tuple[int, ...], first: int, last: int) -> Tensor:
        """Returns rows ``first`` to ``last`` (exclusive) of a tensor, which must have ``shape`` and be of floats,
        as they are stored. Raises CheckpointError.
        """
        name = self._stored(name)
        if part_of(name)[1] is not None:
            return self._read(name, shape)[first:last]
        path = self._files.get(name)
        stored = None if path is None else self._handles[path].get_slice(self._own.get(name, name))
        if stored is None or tuple(stored.get_shape()) != shape or stored.get_dtype() not in FLOATS:
            self._read(name, shape)  # says what is wrong
        assert stored is not None
        assert path is not None
        self._read_from.add(path)
        part: Tensor = stored[first:last]
        return part

    def release(self) -> None:
        """Unmaps the files that were read, so that their pages no longer count as this process's memory; tensors
        that somebody holds keep theirs. Raises CheckpointError if such a file is gone or another.
        """
        for path in self._read_from:
            self._handles[path] = _open(path)
            self._require_same(path)
        self._read_from.clear()

    def _require_same(self, path: Path) -> None:
        """Raises CheckpointError if ``path`` names another file, or other bytes, than were mapped first."""
        if self._mapped[path] != identity(path):
            raise CheckpointError(f"{path} changed while it was read; start again once it is whole", "model")

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error about tensor ``name`` that also names its file."""
        where = self._files.get(name) or next(iter(self._handles))
        return CheckpointError(f"{where}: tensor {name} {problem}", "model")

    def fingerprint(self, config: Json, hashes: Hashes = content_hashes) -> str:
        """Returns a hex SHA-256 over ``config`` and each tensor's name, dtype, shape and bytes, in the order of
        names. Every byte counts, and it doesn't matter which file has a tensor.

        Above 256 MiB a tensor's hash stands for its bytes (``hashes``, which caches them, so that a large
        model's later starts don't read all of its files). Raises CheckpointError.
        """
        digest = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
        small = sum(path.stat().st_size for path in self._handles) <= WHOLE_BYTES
        hash_of = {} if small else self._hashes(hashes)
        for name in sorted(set(self._files) - set(self._own)):
            tensor = self._read(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data if small else hash_of[name])
        return digest.hexdigest()

    def _hashes(self, hashes_of: Hashes) -> dict[str, bytes]:
        """Returns each tensor's hash by its name in the files; of one that several files have, that of the file
        which is read.
        """
        found: dict[str, bytes] = {}
        for path in self._handles:
            hashes = hashes_of(path, _spans(path))
            self._require_same(path)  # what is loaded comes from the file that was hashed
            found |= {name: value.encode() for name, value in hashes.items() if self._files.get(name) == path}
        return found

    def _stack(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """Returns a new tensor, filled source by source, so that the peak is the weight itself, not twice its
        size.
        """
        if not weight.sources:
            return torch.full(weight.shapes[0], weight.plus)
        rows = sum(shape[0] for shape in weight.shapes)
        dtype = torch.float32 if weight.is_float32 else dtype
        stacked, at = torch.empty((rows, *weight.shapes[0][1:]), dtype=dtype), 0
        for name, shape in zip(weight.sources, weight.shapes, strict=True):
            stacked[at : at + shape[0]] = self._read(name, shape)
            at += shape[0]
        return _changed(stacked, weight)

    def _stack_rows(self, weight: Weight, dtype: torch.dtype, own: Rows) -> Tensor:
        """Returns the row ranges ``own`` of the stacked sources, reading only these rows."""
        found, dtype = [], torch.float32 if weight.is_float32 else dtype
        for begin, end in own:
            at = 0
            for name, shape in zip(weight.sources, weight.shapes, strict=True):
                first, last = max(begin, at) - at, min(end, at + shape[0]) - at
                if first < last:
                    found.append(self.rows(name, shape, first, last).to(dtype))
                at += shape[0]
        return _changed(torch.cat(found), weight)

    def _stored(self, name: str) -> str:
        """Returns a tensor's source in these files: the expert's own tensor, or its part of one that holds all
        experts.
        """
        if part_of(name)[0] in self._files:
            return name
        others = (other for other in (stacked_source(name), own_source(name)) if other is not None)
        return next((other for other in others if part_of(other)[0] in self._files), name)

    def _read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        name, part = part_of(self._stored(name))
        path = self._files.get(name)
        if path is None:
            where = ", ".join(str(path) for path in self._handles)
            raise CheckpointError(f"tensor {name} is missing; looked in {where}", "model")
        self._read_from.add(path)
        tensor = self._handles[path].get_tensor(self._own.get(name, name))
        if part is not None:
            shape_of_all = tuple(tensor.shape)
            tensor = part.of(tensor, self.error(name, f"has shape {shape_of_all}, not one of all experts'"))
        if shape is not None and tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise CheckpointError(f"{path}: tensor {name} has shape {found}, config.json asks for {shape}", "model")
        if shape is not None and not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}; only float weights are known", "model")
        return tensor


def _changed(found: Tensor, weight: Weight) -> Tensor:
    return found.add_(weight.plus).mul_(weight.times) if weight.is_changed else found


def _files(directory: Path) -> dict[str, Path]:
    """Returns each tensor's file by name, from the shard index or the header of a single file."""
    index, single = directory / INDEX, directory / SINGLE
    if index.exists():
        return {name: directory / file for name, file in _weight_map(index).items()}
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}; only safetensors are read", "model")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = msgspec.json.decode(index.read_bytes(), type=Json)
        return msgspec.convert(found.get("weight_map"), dict[str, str])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{index} can't be read as a shard index: {error}", "model") from error


def _open(path: Path) -> safe_open:
    if not path.exists():
        raise CheckpointError(f"{path} is missing, though {INDEX} names it", "model")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path} ({size} bytes) is damaged or truncated: {error}", "model") from error


class _Entry(msgspec.Struct):
    """An entry of a file's header; that of the metadata has no bytes."""

    data_offsets: tuple[int, int] | None = None  # of the first byte and past the last, after the header


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    """Returns where the file has each tensor's bytes: the first one's offset, and their number."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(HEADER_BYTES), "little")
        header = msgspec.json.decode(file.read(size), type=dict[str, _Entry])
    spans = {name: entry.data_offsets for name, entry in header.items() if entry.data_offsets is not None}
    return {name: (HEADER_BYTES + size + first, last - first) for name, (first, last) in spans.items()}
