"""Holds adapters as torch tensors, by site, for the reference kernel ``lora``. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import Array, PackedAdapter, PackedPart
from baton.engine.plan import AdapterHost, SequenceStep
from baton.kernels.lora.reference import AdaptedRows, LoraMatrices
from baton.protos.errors import AdapterNotLoaded

Matrices = dict[int, tuple[LoraMatrices, ...]]  # by site
PIECE_PARTS = 32  # taken at a time, because a narrow matrix B takes some 10 µs
Spans = list[tuple[str, range]]  # adapters of a step's sequences, and their rows


class TorchAdapters(AdapterHost):
    """Implements ``AdapterHost`` with torch tensors."""

    def __init__(self, base: AdapterBase) -> None:
        self.base = base
        self._held: dict[str, Matrices] = {}

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Applies ``packed`` to sequences that name ``adapter``, in short pieces."""
        found: Matrices = {}
        for at, part in enumerate(packed.parts):
            found[part.site.number] = (*found.get(part.site.number, ()), _matrices(packed, part))
            if at % PIECE_PARTS == PIECE_PARTS - 1:
                yield
        self._held[adapter] = found

    def drop(self, adapter: str) -> None:
        """Removes an adapter that no sequence names any more."""
        self._held.pop(adapter, None)

    def rows(self, site: int, groups: dict[str, Tensor]) -> list[AdaptedRows]:
        """Returns those of ``groups``, rows by adapter, whose adapters have matrices at ``site``, with these."""
        return [
            AdaptedRows(rows, parts) for name, rows in groups.items() if (parts := self._held[name].get(site, ()))
        ]

    def require(self, items: Iterable[SequenceStep]) -> None:
        """Raises AdapterNotLoaded if an item names an adapter that isn't held."""
        for item in items:
            require_held(item.adapter, self._held)


def require_held(adapter: str, held: Iterable[str]) -> None:
    """Raises AdapterNotLoaded unless ``adapter`` is empty or among ``held``."""
    if adapter and adapter not in held:
        raise AdapterNotLoaded(f"adapter {adapter!r} is not loaded here", "adapter_id")


def matrices_of(packed: PackedAdapter) -> Matrices:
    """Returns an adapter's matrices by site number; matrices A are views of its memory."""
    found: Matrices = {}
    for part in packed.parts:
        found[part.site.number] = (*found.get(part.site.number, ()), _matrices(packed, part))
    return found


def _matrices(packed: PackedAdapter, part: PackedPart) -> LoraMatrices:
    a, b = _tensor(packed.first(part)), _tensor(packed.plain_second(part))
    return LoraMatrices(a, b, part.scale, part.site.first, part.site.looked_up)


def grouped(spans: Spans) -> dict[str, Tensor]:
    """Returns the rows of each adapter, int64; rows without an adapter are in no group."""
    found: dict[str, list[int]] = {}
    for adapter, rows in spans:
        if adapter:
            found.setdefault(adapter, []).extend(rows)
    return {adapter: torch.tensor(rows) for adapter, rows in found.items()}


def _tensor(values: Array) -> Tensor:
    if values.dtype.itemsize == 4:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view("int16")).view(torch.bfloat16)
