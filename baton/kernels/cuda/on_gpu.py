"""Gives the suites the CUDA library on a machine with a GPU: the same checks that run on the SIMT shim. Torch-free.

Knows nothing of the ops. Suites hand over addresses of host memory, also inside structs. Where the driver lets
kernels read any of the host's memory (cudaDevAttrPageableMemoryAccess), they are passed on as they are; elsewhere
the process's writable memory is registered with the driver around each call.

$BATON_CUDA_ON_GPU=1 makes ``build.simt`` and ``shim.as_library`` mean this (bench/gpu.py sets it for its checks).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.kernels.abi.native import CType
from baton.kernels.cuda.library import CudaLibrary, DeviceError

ON_GPU_ENV = "BATON_CUDA_ON_GPU"
MOST_REGION = 4 << 30  # bytes of the largest region that is registered
_REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ \S+\s*(\S*)$", re.M)


class GpuError(AssertionError):
    """Carries what CUDA said of a call."""


class GpuFunction:
    """Calls one exported op, with ``argtypes`` as the CPU's symbol has them, and waits for the GPU before it
    returns.
    """

    def __init__(self, gpu: OnGpu, name: str) -> None:
        self._gpu, self._call = gpu, gpu.device.library[name]
        self.argtypes: list[CType] = []
        self.restype: CType | None = None

    def __call__(self, *arguments: object) -> None:
        self._call.argtypes, self._call.restype = [*self.argtypes, ctypes.c_void_p], ctypes.c_int
        self._gpu.calls += 1
        with self._gpu.memory_shared():
            status = self._call(*arguments, None)
            if status:
                said = self._gpu.device.library.baton_device_error(status) or b"failed"
                raise GpuError(f"status {status}: {said.decode(errors='replace')}")
            try:
                self._gpu.device.call("device_wait", None)
            except DeviceError as error:
                raise GpuError(str(error)) from error


class OnGpu:
    """Stands in for a ``shim.Simt``."""

    def __init__(self, path: Path) -> None:
        self.path, self.device, self.calls = path, CudaLibrary(path), 0
        pageable = ctypes.c_int()
        self.device.call("device_pageable", ctypes.byref(pageable))
        self._pageable = bool(pageable.value)

    def schedule(self, seed: int, preempt: int = 0, blocks: int = 2) -> None:
        """Does nothing, because a GPU schedules as it likes."""

    def launches(self) -> int:
        """Returns the number of calls so far."""
        return self.calls

    def error(self) -> str:
        """Returns nothing, because errors are in what was raised."""
        return ""

    def __getitem__(self, name: str) -> GpuFunction:
        return GpuFunction(self, name)

    @contextmanager
    def memory_shared(self) -> Iterator[None]:
        """Lets kernels reach the host's memory while they run."""
        held = [] if self._pageable else [at for at, size in writable(self._maps()) if self._held(at, size)]
        try:
            yield
        finally:
            for at in held:
                self.device.call("device_unregister", at)

    def _held(self, at: int, size: int) -> bool:
        """What CUDA holds already, or can't hold, is left alone; a kernel that needs it says so."""
        return self.device.library.baton_device_register(ctypes.c_void_p(at), ctypes.c_int64(size)) == 0

    def _maps(self) -> str:
        return Path("/proc/self/maps").read_text()


def asked() -> bool:
    """Returns whether the suites are to run on a GPU."""
    return os.environ.get(ON_GPU_ENV) == "1"


def writable(maps: str) -> list[tuple[int, int]]:
    """Returns address and size of the private memory that a program's own data can lie in, by
    /proc/self/maps.
    """
    found = []
    for begin, end, name in _REGION.findall(maps):
        at, size = int(begin, 16), int(end, 16) - int(begin, 16)
        if name in ("", "[heap]") and size <= MOST_REGION:
            found.append((at, size))
    return found
