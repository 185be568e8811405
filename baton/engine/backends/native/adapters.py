"""Holds adapters in the form that the native step reads, and groups a step's rows by adapter.

Knows nothing of files. One struct, to which every Adapt op of the program points, assigns adapters to the rows of
the next step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import Array, PackedAdapter, PackedPart
from baton.engine.backends.torch.adapters import matrices_of, require_held
from baton.engine.plan import SequenceStep
from baton.engine.program.ops import Moe
from baton.kernels.abi.native import BF16, F32
from baton.kernels.lora.reference import AdaptedRows
from baton.kernels.lora.structs import LoraGroup, LoraPart, LoraSite, LoraStep
from baton.kernels.moe.reference import ExpertAdapters


class StepAdapter(Protocol):
    """An adapter as the step reads it; ``address`` is that of its array of LoraSite."""

    address: int


class NativeAdapter:
    """The C structs of one adapter, over its packed memory; ``address`` is that of its array of LoraSite.

    ``beside`` has further parts of the same adapter, in another memory.
    """

    def __init__(self, packed: PackedAdapter, sites: int, *beside: PackedAdapter) -> None:
        self.packed, self._beside = packed, beside
        self._parts, numbers = parts_at(*((one, _address(one)) for one in (packed, *beside)))
        self._sites = sites_at(numbers, sites, ctypes.addressof(self._parts))
        self.address = ctypes.addressof(self._sites)


def parts_at(*pieces: tuple[PackedAdapter, int]) -> tuple[ctypes.Array[LoraPart], list[int]]:
    """Returns the structs of the parts of one adapter's ``pieces``, each with the address of its matrices, and the
    parts' sites' numbers, ascending; a site's parts are in the order of their outputs.
    """
    placed = [(part, base) for packed, base in pieces for part in packed.parts]
    placed.sort(key=lambda each: (each[0].site.number, each[0].site.first))
    numbers = [part.site.number for part, _ in placed]
    return (LoraPart * len(placed))(*[_struct(part, base) for part, base in placed]), numbers


def _address(packed: PackedAdapter) -> int:
    found: int = np.frombuffer(packed.memory, np.uint8).ctypes.data
    return found


def sites_at(numbers: list[int], sites: int, base: int) -> ctypes.Array[LoraSite]:
    """Returns the structs of ``sites`` sites; the parts are at address ``base``, in the order of ``numbers``."""
    found = (LoraSite * sites)(*[LoraSite(base, 0) for _ in range(sites)])
    for at, number in enumerate(numbers):
        site = found[number]
        if not site.count:
            site.parts = base + at * ctypes.sizeof(LoraPart)
        site.count += 1
    return found


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
        self.rows = {name: np.array(found, np.int32) for name, found in rows.items()}
        structs = [LoraGroup(held[name].address, at.ctypes.data, len(at)) for name, at in self.rows.items()]
        groups = (LoraGroup * len(structs))(*structs)
        self._kept = [self.rows, groups]
        self._step.groups, self._step.count = ctypes.addressof(groups), len(structs)


class NativeAdapters:
    """Implements ``AdapterHost`` for a program with ``sites`` adapter sites. ``step`` is the C struct for the next
    step.
    """

    def __init__(self, base: AdapterBase, sites: int, step: LoraStep) -> None:
        self.base = base
        self._sites, self._groups = sites, RowGroups(step)
        self._held: dict[str, NativeAdapter] = {}

    def hold(self, adapter: str, packed: PackedAdapter) -> None:
        """Applies ``packed`` to sequences that name ``adapter``."""
        self._held[adapter] = NativeAdapter(packed, self._sites)

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


def _struct(part: PackedPart, base: int) -> LoraPart:
    site = part.site
    return LoraPart(
        a=base + part.a,
        b=base + part.b,
        k=site.inputs,
        first=site.first,
        n=site.outputs,
        rank=part.rank,
        dtype=BF16 if part.narrow else F32,
        scale=part.scale,
        looked_up=site.looked_up,
    )
