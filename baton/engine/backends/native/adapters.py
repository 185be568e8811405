"""Holds adapters in the form that the native step reads, and groups a step's rows by adapter.

Knows nothing of files. One struct, to which every Adapt op of the program points, assigns adapters to the rows of
the next step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import Array, PackedAdapter
from baton.engine.adapters.part_table import rows_of
from baton.engine.backends.adapter_matrices import matrices_of, require_held
from baton.engine.backends.native.adapter_structs import AdapterStructs, address_of
from baton.engine.plan import SequenceStep
from baton.engine.program.ops import Moe
from baton.kernels.lora.reference import AdaptedRows
from baton.kernels.lora.structs import LoraGroup, LoraStep
from baton.kernels.moe.reference import ExpertAdapters


class StepAdapter(Protocol):
    """An adapter as the step reads it; ``address`` is that of its array of LoraSite."""

    address: int


class NativeAdapter:
    """The C structs of one adapter, over its packed memory; ``address`` is that of its array of LoraSite."""

    def __init__(self, packed: PackedAdapter, structs: AdapterStructs, sites: int) -> None:
        self.packed, self._structs = packed, structs
        structs.join()
        structs.place(address_of(structs.parts), sites)
        self.address = address_of(structs.sites)


class RowGroups:
    """Assigns adapters to the rows of the next step, in the C struct ``step``; ``rows`` has their indices by id."""

    def __init__(self, step: LoraStep) -> None:
        self._step = step
        self._kept: list[object] = []  # that the struct points to
        self.rows: dict[str, Array] = {}

    def place(self, items: Sequence[SequenceStep], held: Mapping[str, StepAdapter]) -> None:
        """Writes to the struct which rows of ``items`` have which adapter of ``held``. Raises AdapterNotLoaded."""
        rows: dict[str, list[int]] = {}
        first = 0
        for item in items:
            count = len(item.tokens)
            if item.adapter:
                require_held(item.adapter, held)
                rows.setdefault(item.adapter, []).extend(range(first, first + count))
            first += count
        self.write({name: np.array(found, np.int32) for name, found in rows.items()}, held)

    def write(self, rows: dict[str, Array], held: Mapping[str, StepAdapter]) -> None:
        """Writes to the struct which rows, int32, have which adapter of ``held``."""
        self.rows = rows
        structs = [LoraGroup(held[name].address, at.ctypes.data, len(at)) for name, at in self.rows.items()]
        groups = (LoraGroup * len(structs))(*structs)
        self._kept = [self.rows, groups]
        self._step.groups, self._step.count = ctypes.addressof(groups), len(structs)


class NativeAdapters(AdapterHost):
    """Implements ``AdapterHost`` for a program with ``sites`` adapter sites. ``step`` is the C struct for the next
    step.
    """

    def __init__(self, base: AdapterBase, sites: int, step: LoraStep) -> None:
        self.base = base
        self._sites, self._groups = sites, RowGroups(step)
        self._held: dict[str, NativeAdapter] = {}

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Applies ``packed`` to sequences that name ``adapter``, in short pieces."""
        structs = AdapterStructs()
        yield from structs.add(rows_of(packed.parts), address_of(packed.memory))
        self._held[adapter] = NativeAdapter(packed, structs, self._sites)

    def drop(self, adapter: str) -> None:
        """Removes an adapter that no sequence names any more."""
        self._held.pop(adapter, None)

    def group(self, items: Sequence[SequenceStep]) -> None:
        """Writes to the step's struct which rows of ``items`` have which adapter. Raises AdapterNotLoaded."""
        self._groups.place(items, self._held)

    def rows(self, site: int) -> list[AdaptedRows]:
        """Returns the step's groups of rows with their adapters' matrices at ``site``, for the reference
        implementation.
        """
        found = []
        for name, rows in self._groups.rows.items():
            if parts := matrices_of(self._held[name].packed).get(site, ()):
                found.append(AdaptedRows(torch.from_numpy(rows), parts))
        return found

    def beside_experts(self, sites: Mapping[str, int], op: Moe) -> ExpertAdapters:
        """Returns the same beside the two layers of ``op``, whose weights' sites are ``sites``."""
        return ExpertAdapters(*(self.rows(sites[name]) for name in (op.gate_up, op.down)))
