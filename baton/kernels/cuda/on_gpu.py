"""Runs the suites of the SIMT shim with the CUDA library on a machine with a GPU. Torch-free.

Knows nothing of the ops. Suites pass addresses of host memory, also inside structs. If the driver lets kernels read
all host memory (cudaDevAttrPageableMemoryAccess), they are passed on. Otherwise all of the process's allocations
are kept in its heap, which is registered with the driver as it grows: that needs Python's own allocator off
($PYTHONMALLOC=malloc), and ``heap_only`` before the allocations. $BATON_CUDA_ON_GPU=1 makes ``build.simt`` and
``shim.as_library`` use this (bench/gpu.py sets it for its checks).
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from baton.kernels.abi.native import CType
from baton.kernels.cuda.library import CudaLibrary, DeviceError

ON_GPU_ENV = "BATON_CUDA_ON_GPU"
MALLOC_ENV = "PYTHONMALLOC"
GROWTH = 256 << 20  # bytes that the heap grows by at least, because each piece is registered by itself
_HEAP = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ \S+\s*\[heap\]$", re.M)
_REGISTERED = [0]  # where the heap ended that the driver knows; of this process, whatever loads the library
_TRIM, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # mallopt(3)


class GpuError(AssertionError):
    """Raised if a CUDA call fails; the message is CUDA's."""


class GpuFunction:
    """Calls one exported op with ``argtypes`` as of the CPU's function, and waits for the GPU before it returns."""

    def __init__(self, gpu: OnGpu, name: str) -> None:
        self._gpu, self._call = gpu, gpu.device.library[name]
        self.argtypes: list[CType] = []
        self.restype: CType | None = None

    def __call__(self, *arguments: object) -> None:
        self._call.argtypes, self._call.restype = [*self.argtypes, ctypes.c_void_p], ctypes.c_int
        self._gpu.calls += 1
        self._gpu.memory_shared()
        status = self._call(*arguments, None)
        if status:
            said = self._gpu.device.library.baton_device_error(status) or b"failed"
            raise GpuError(f"status {status}: {said.decode(errors='replace')}")
        try:
            self._gpu.device.call("device_wait", None)
        except DeviceError as error:
            raise GpuError(str(error)) from error


class OnGpu:
    """A CUDA library with the interface of ``shim.Simt``."""

    def __init__(self, path: Path) -> None:
        self.path, self.device, self.calls = path, CudaLibrary(path), 0
        self.rehearsal = self.device.rehearsal
        pageable = ctypes.c_int()
        self.device.call("device_pageable", ctypes.byref(pageable))
        self._pageable = bool(pageable.value)

    def schedule(self, seed: int, preempt: int = 0, blocks: int = 2) -> None:
        """Does nothing, because a GPU's schedule can't be chosen."""

    def launches(self) -> int:
        """Returns the number of calls so far."""
        return self.calls

    def error(self) -> str:
        """Returns "", because errors are in the exceptions that were raised."""
        return ""

    def __getitem__(self, name: str) -> GpuFunction:
        return GpuFunction(self, name)

    def memory_shared(self) -> None:
        """Makes the host's memory accessible to kernels, by registering the heap if needed. Raises GpuError if that
        fails.
        """
        if self._pageable:
            return
        if os.environ.get(MALLOC_ENV) != "malloc":
            raise GpuError(
                f"this driver reads registered memory only: set {MALLOC_ENV}=malloc, as bench/on_card.py does"
            )
        begin, end = heap(Path("/proc/self/maps").read_text())
        begin = max(begin, _REGISTERED[-1])
        if end > begin:
            self.device.call("device_register", begin, end - begin)
            _REGISTERED.append(end)


def asked() -> bool:
    """Returns whether the suites are to run on a GPU."""
    return os.environ.get(ON_GPU_ENV) == "1"


def heap_only() -> None:
    """Makes this process allocate only from its heap, which then grows in large pieces and never shrinks
    (glibc).
    """
    libc = ctypes.CDLL(None)
    for option, value in ((_MMAP_MAX, 0), (_ARENA_MAX, 1), (_TRIM, 2**31 - 1), (_TOP_PAD, GROWTH)):
        libc.mallopt(option, value)


def heap(maps: str) -> tuple[int, int]:
    """Returns the begin and end addresses of the heap in ``maps``, the text of /proc/self/maps; (0, 0) if there is
    none.
    """
    found = _HEAP.search(maps)
    return (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
