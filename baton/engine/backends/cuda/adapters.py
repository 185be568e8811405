"""Holds adapters in the GPU's memory, in the form that the step's kernels read.

Knows nothing of files or of plans. What the kernels follow is on the device: matrices, the structs of parts and of
sites. Which rows have which adapter goes over with each step's plan (kernels/step/staging.cuh).
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from baton.engine.adapters.base import AdapterBase, without_experts
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.backends.native.adapters import RowGroups, parts_at, sites_at
from baton.engine.plan import SequenceStep
from baton.engine.program.sites import HEAD_MODULE
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.lora.structs import MOST_RANK, MOST_SITE_RANKS, LoraPart, LoraSite, LoraStep
from baton.protos.errors import AdaptersFull


def on_device(base: AdapterBase) -> AdapterBase:
    """Returns ``base`` without the sites of the head, whose kernel chooses tokens from its own products, and of
    experts, whose kernel keeps what is between their layers to itself.
    """
    found = without_experts(base)
    sites = {module: site for module, site in found.sites.items() if module != HEAD_MODULE}
    return msgspec.structs.replace(found, sites=sites)


class DeviceAdapter:
    """One adapter in memory of ``device`` until ``close``; ``address`` is that of its array of LoraSite there.

    Raises DeviceError if there is too little memory, and then holds none.
    """

    def __init__(self, packed: PackedAdapter, sites: int, device: CudaLibrary) -> None:
        self._device = device
        self._taken: list[int] = []
        try:
            matrices = np.frombuffer(packed.memory, np.uint8)
            parts, numbers = parts_at((packed, self._put(matrices.ctypes.data, matrices.nbytes)))
            self.address = self._put_structs(sites_at(numbers, sites, self._put_structs(parts)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the device memory."""
        while self._taken:
            self._device.release(self._taken.pop())

    def _put_structs(self, structs: ctypes.Array[LoraPart] | ctypes.Array[LoraSite]) -> int:
        return self._put(ctypes.addressof(structs), ctypes.sizeof(structs))

    def _put(self, address: int, size: int) -> int:
        self._taken.append(self._device.put(address, size))
        return self._taken[-1]


class CudaAdapters:
    """Implements ``AdapterHost`` on a GPU, for a program with ``sites`` adapter sites. ``step`` is the C struct for
    the next step.
    """

    def __init__(self, base: AdapterBase, sites: int, step: LoraStep, device: CudaLibrary) -> None:
        self.base = on_device(base)
        modules = Counter(site.number for site in self.base.sites.values())
        assert max(modules.values()) * MOST_RANK <= MOST_SITE_RANKS, "rows.cuh has room for four modules of a site"
        self._sites, self._device, self._groups = sites, device, RowGroups(step)
        self._held: dict[str, DeviceAdapter] = {}

    def hold(self, adapter: str, packed: PackedAdapter) -> None:
        """Copies ``packed`` to the GPU, for sequences that name ``adapter``. Raises AdaptersFull if there is too
        little memory.
        """
        try:
            self._held[adapter] = DeviceAdapter(packed, self._sites, self._device)
        except DeviceError as error:
            raise AdaptersFull(f"the card has no room for adapter {adapter}: {error}") from error

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
