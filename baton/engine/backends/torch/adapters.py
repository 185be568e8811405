"""Holds adapters as torch tensors, by site, for the reference kernel ``lora``. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.backends.adapter_matrices import Matrices, part_matrices, require_held
from baton.engine.plan import SequenceStep
from baton.kernels.lora.reference import AdaptedRows

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
            found[part.site.number] = (*found.get(part.site.number, ()), part_matrices(packed, part))
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


def grouped(spans: Spans) -> dict[str, Tensor]:
    """Returns the rows of each adapter, int64; rows without an adapter are in no group."""
    found: dict[str, list[int]] = {}
    for adapter, rows in spans:
        if adapter:
            found.setdefault(adapter, []).extend(rows)
    return {adapter: torch.tensor(rows) for adapter, rows in found.items()}
