"""Reads a PEFT adapter from its directory: checks the header, then hashes and packs the tensors. Torch-free.

Knows nothing of requests or of adapters already loaded. Every failure is an AdapterRefused that names the file and
the field or tensor, or AdapterChanged if the content hasn't the requested digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.copies import require_same
from baton.engine.adapters.directory import AdapterFiles, opened
from baton.engine.adapters.matrices import MatrixPair, copied, matched
from baton.engine.adapters.pace import Pacing, no_pace
from baton.engine.adapters.packed import Array, PackedAdapter, Packer, laid_out
from baton.engine.adapters.part_table import PartTable
from baton.engine.adapters.peft_config import LoraSettings, read_config
from baton.engine.adapters.stack_packing import StackPacker
from baton.engine.adapters.tensors import FILE, SIZES, TensorEntry, TensorFile, read_header, values
from baton.kernels.lora.structs import MOST_RANK, PANEL
from baton.protos.adapter_id import DIGEST_DIGITS, adapter_id
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterChanged, AdapterRefused
from baton.protos.nouns import AdapterInfo

ANY_SITES = 1 << 15  # modules that an adapter may have, so that an error about a wrong one names it and no number
PIECE_BYTES = 1 << 15  # read at a time, some 50 µs of work
SPARE_TENSORS = 8  # beyond two per site, so that an error about a few wrong tensors names them


class AdapterContent(NamedTuple):
    """A read adapter, without the memory of its packed matrices."""

    info: AdapterInfo
    parts: PartTable


def read_adapter(
    source: AdapterPlace,
    base: AdapterBase,
    memory: Callable[[int, int], memoryview],
    pace: Pacing = no_pace,
) -> tuple[AdapterContent, memoryview]:
    """Returns the adapter at ``source`` and the buffer with its packed matrices: ``memory(bytes, tensors)``, where
    the second says how many tensors are to be read. Raises AdapterRefused and AdapterChanged.

    ``pace`` is called between short parts of the work.
    """
    with opened(source.path, source.root) as files:
        settings = read_config(files)
        with files.open(FILE) as (descriptor, size):
            most = 2 * max(len(base.sites) + len(base.idle), ANY_SITES) + SPARE_TENSORS
            file = read_header(files, descriptor, size, most, pace)
            pairs = _fitting(file, settings, base, pace)
            for name, module in copied(file, base.sites).items() if base.sites else ():
                require_same(file, descriptor, file.entries[name], module, base.model, pace)
            room = memory(sum(pair.bytes for pair in pairs), 2 * len(pairs))
            parts, digest = laid_out(pairs), _Digest(pairs)
            adapter, left = PackedAdapter(parts, room), iter(parts)
            for pair in pairs:
                own = list(islice(left, len(pair.sites)))
                packer = Packer(adapter, own[0]) if pair.stack is None else StackPacker(adapter, own, pair.stack)
                for entry, least, pack in ((pair.a, 1, packer.first), (pair.b, PANEL, packer.second)):
                    for first, rows in digest.read(file, descriptor, entry, least):
                        pack(first, rows)
                        pace()
    info = _info(source, files, pairs, digest.hex)
    return AdapterContent(info, PartTable.of(parts)), room


def _fitting(file: TensorFile, settings: LoraSettings, base: AdapterBase, pace: Pacing) -> tuple[MatrixPair, ...]:
    pairs = matched(file, settings, base, min(base.max_rank, MOST_RANK), pace)
    count = sum(pair.bytes for pair in pairs)
    if count > base.max_bytes:
        text = f"its matrices take {count} bytes; {base.max_bytes} at most (adapters.max_bytes)"
        raise AdapterRefused(f"{file.where}: {text}", "lora_path")
    return pairs


class _Digest:
    """The SHA-256 of what an adapter does: each module's scale, and each tensor's type, shape and bytes."""

    def __init__(self, pairs: tuple[MatrixPair, ...]) -> None:
        scales = [(pair.module, pair.scale) for pair in pairs]
        self._digest = hashlib.sha256(msgspec.json.encode(scales))

    @property
    def hex(self) -> str:
        return self._digest.hexdigest()[:DIGEST_DIGITS]

    def read(
        self, file: TensorFile, descriptor: int, entry: TensorEntry, least: int
    ) -> Iterator[tuple[int, Array]]:
        """Yields one tensor's values by a multiple of ``least`` rows, each with its first row's index, after adding
        them to the digest. Raises AdapterRefused if one isn't finite.
        """
        self._digest.update(f"{entry.name} {entry.dtype} {entry.shape}".encode())
        count, width = entry.shape
        row_bytes = width * SIZES[entry.dtype]
        step = least * max(1, PIECE_BYTES // (least * row_bytes))
        for first in range(0, count, step):
            rows = min(step, count - first)
            raw = file.piece(descriptor, entry, first * row_bytes, rows * row_bytes)
            self._digest.update(raw)
            found = values(raw, entry.dtype, width)
            finite = (found & 0x7F80) != 0x7F80 if found.dtype == np.uint16 else np.isfinite(found)
            if not finite.all():
                raise file.error(entry.name, "holds a NaN or an infinity")
            yield first, found


def _info(source: AdapterPlace, files: AdapterFiles, pairs: tuple[MatrixPair, ...], digest: str) -> AdapterInfo:
    if source.digest and source.digest != digest:
        text = f"{files.path} holds {source.name}@{digest}, and {source.digest} is meant: its files were replaced"
        raise AdapterChanged(text, "digest")
    return AdapterInfo(
        id=adapter_id(source.name, digest),
        path=source.path,
        rank=max(pair.rank for pair in pairs),
        bytes=sum(pair.bytes for pair in pairs),
        targets=tuple(sorted({pair.module.rpartition(".")[2] for pair in pairs})),
    )
