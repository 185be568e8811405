"""Holds adapters in the GPU's memory, in the form that the step's kernels read.

Knows nothing of files or of plans. What the kernels follow is on the device: matrices, the structs of parts and of
sites. Which rows have which adapter goes over with each step's plan (kernels/step/staging.cuh).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from baton.engine.adapters.base import AdapterBase, without_experts
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.part_table import rows_of
from baton.engine.backends.native.adapter_structs import AdapterStructs, Structs, address_of
from baton.engine.backends.native.adapters import RowGroups
from baton.engine.plan import AdapterHost, SequenceStep
from baton.engine.program.sites import HEAD_MODULE
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.lora.structs import MOST_RANK, MOST_SITE_RANKS, LoraStep
from baton.protos.errors import AdaptersFull

COPY_BYTES = 1 << 20  # of matrices, copied to the card at a time, in a tenth of a millisecond


def on_device(base: AdapterBase) -> AdapterBase:
    """Returns ``base`` without the sites of the head, whose kernel chooses tokens from its own products, and of
    experts, whose kernel keeps what is between their layers to itself.
    """
    found = without_experts(base)
    sites = {module: site for module, site in found.sites.items() if module != HEAD_MODULE}
    return msgspec.structs.replace(found, sites=sites)


class DeviceAdapter:
    """One adapter in memory of ``device`` until ``close``; ``address`` is that of its array of LoraSite there."""

    def __init__(self, device: CudaLibrary) -> None:
        self.address = 0
        self._device = device
        self._taken: list[int] = []

    def putting(self, packed: PackedAdapter, sites: int) -> Iterator[None]:
        """Copies ``packed`` there in pieces of COPY_BYTES. Raises DeviceError if there is too little memory, and
        then, or if it isn't carried to its end, holds none.
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
            self.address = self._put(structs.sites)
        finally:
            if not self.address:
                self.close()

    def close(self) -> None:
        """Frees the device memory."""
        while self._taken:
            self._device.release(self._taken.pop())

    def _put(self, structs: Structs) -> int:
        self._taken.append(self._device.put(address_of(structs), structs.nbytes))
        return self._taken[-1]


class CudaAdapters(AdapterHost):
    """Implements ``AdapterHost`` on a GPU, for a program with ``sites`` adapter sites. ``step`` is the C struct for
    the next step.
    """

    def __init__(self, base: AdapterBase, sites: int, step: LoraStep, device: CudaLibrary) -> None:
        self.base = on_device(base)
        modules = Counter(site.number for site in self.base.sites.values())
        assert max(modules.values()) * MOST_RANK <= MOST_SITE_RANKS, "rows.cuh has room for four modules of a site"
        self._sites, self._device, self._groups = sites, device, RowGroups(step)
        self._held: dict[str, DeviceAdapter] = {}

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Copies ``packed`` to the GPU in short pieces, for sequences that name ``adapter``. Raises AdaptersFull if
        there is too little memory.
        """
        found = DeviceAdapter(self._device)
        try:
            yield from found.putting(packed, self._sites)
        except DeviceError as error:
            raise AdaptersFull(f"the card has no room for adapter {adapter}: {error}") from error
        self._held[adapter] = found

    def drop(self, adapter: str) -> None:
        """Frees an adapter that no sequence names any more; no step is running then."""
        if (held := self._held.pop(adapter, None)) is not None:
            held.close()

    def group(self, items: Sequence[SequenceStep]) -> None:
        """Writes to the step's struct which rows of ``items`` have which adapter. Raises AdapterNotLoaded."""
        self._groups.place(items, self._held)

    def close(self) -> None:
        """Frees the memory of every adapter on the card."""
        for adapter in list(self._held):
            self.drop(adapter)
