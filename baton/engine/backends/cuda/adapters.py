"""Holds adapters in the GPU's memory, in the form that the step's kernels read.

Knows nothing of files or of plans. What the kernels follow is on the device: matrices, the structs of parts and of
sites. Which rows have which adapter goes over with each step's plan (kernels/step/staging.cuh).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import Array, PackedAdapter
from baton.engine.adapters.part_table import rows_of
from baton.engine.backends.native.adapter_structs import AdapterStructs, Structs, address_of
from baton.engine.backends.native.adapters import RowGroups
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.program.program import Program
from baton.engine.program.sites import head_site, is_expert, site_count
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.lora.structs import MOST_RANK, MOST_SITE_RANKS, LoraStep
from baton.protos.errors import AdaptersFull

COPY_BYTES = 1 << 20  # of matrices, copied to the card at a time, in a tenth of a millisecond


class DeviceAdapter:
    """One adapter in memory of ``device`` until ``close``; ``address`` is that of its array of LoraSite there."""

    def __init__(self, device: CudaLibrary) -> None:
        self.address, self.has_head = 0, False
        self._device = device
        self._taken: list[int] = []

    def putting(self, packed: PackedAdapter, sites: int, head: int) -> Iterator[None]:
        """Copies ``packed`` there in pieces of COPY_BYTES; site ``head`` of ``sites`` is the head's. Raises
        DeviceError if there is too little memory, and then, or if it isn't carried to its end, holds none.
        """
        try:
            size, structs = len(packed.memory), AdapterStructs()
            self._taken.append(matrices := self._device.allocate(size))
            for first in range(0, size, COPY_BYTES):
                some = min(COPY_BYTES, size - first)
                self._device.copy(matrices + first, address_of(packed.memory) + first, some)
                yield
            yield from structs.add(rows_of(packed.parts), matrices)
            structs.join()
            structs.place(self._put(structs.parts), sites)
            self.has_head = bool(structs.sites[head]["count"])
            self.address = self._put(structs.sites)
        finally:
            if not self.address:
                self.close()

    def put_nothing(self, sites: int) -> None:
        """Makes this an adapter without parts beside any of ``sites`` sites. Raises DeviceError."""
        structs = AdapterStructs()
        structs.place(0, sites)
        self.address, self.has_head = self._put(structs.sites), True

    def close(self) -> None:
        """Frees the device memory."""
        while self._taken:
            self._device.release(self._taken.pop())

    def _put(self, structs: Structs) -> int:
        self._taken.append(self._device.put(address_of(structs), structs.nbytes))
        return self._taken[-1]


class CudaAdapters(AdapterHost):
    """Implements ``AdapterHost`` on a GPU, for an adaptable program. ``step`` and ``heads`` are the C structs for
    the next step: all rows, and the sampled ones alone.
    """

    def __init__(
        self, base: AdapterBase, program: Program, step: LoraStep, heads: LoraStep, device: CudaLibrary
    ) -> None:
        self.base = base
        modules = Counter(site.number for module, site in base.sites.items() if not is_expert(module))
        assert max(modules.values()) * MOST_RANK <= MOST_SITE_RANKS, "rows.cuh has room for four modules of a site"
        self._sites, self._head_site = site_count(program), head_site(program)
        self._device, self._groups, self._heads = device, RowGroups(step), RowGroups(heads)
        self._held: dict[str, DeviceAdapter] = {}

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Copies ``packed`` to the GPU in short pieces, for sequences that name ``adapter``. Raises AdaptersFull if
        there is too little memory.
        """
        found = DeviceAdapter(self._device)
        try:
            yield from found.putting(packed, self._sites, self._head_site)
        except DeviceError as error:
            raise AdaptersFull(f"the card has no room for adapter {adapter}: {error}") from error
        self._held[adapter] = found

    @contextmanager
    def rehearsing(self, plan: StepPlan) -> Iterator[StepPlan]:
        """Yields ``plan`` with an adapter of its own beside each item, none of which changes anything. No step may
        name an adapter before; they are gone behind the block. Raises DeviceError.
        """
        nothing = DeviceAdapter(self._device)
        nothing.put_nothing(self._sites)
        names = [f"\0{number}" for number in range(len(plan.items))]
        self._held |= dict.fromkeys(names, nothing)
        try:
            items = zip(plan.items, names, strict=True)
            yield StepPlan(tuple(msgspec.structs.replace(item, adapter=name) for item, name in items))
        finally:
            for name in names:
                self.drop(name)

    def drop(self, adapter: str) -> None:
        """Frees an adapter that no sequence names any more; no step is running then."""
        if (held := self._held.pop(adapter, None)) is not None:
            held.close()

    def group(self, items: Sequence[SequenceStep], sampled: Array) -> None:
        """Writes to the step's structs which rows of ``items`` have which adapter, and which of the rows
        ``sampled``, by their place there, have one beside the head. Raises AdapterNotLoaded.
        """
        self._groups.place(items, self._held)
        heads: dict[str, Array] = {}
        for name, rows in self._groups.rows.items():
            if self._held[name].has_head:
                places = np.flatnonzero(np.isin(sampled, rows)).astype(np.int32)
                heads |= {name: places} if len(places) else {}
        self._heads.write(heads, self._held)

    def close(self) -> None:
        """Frees the memory of every adapter on the card."""
        for adapter in list(self._held):
            self.drop(adapter)
