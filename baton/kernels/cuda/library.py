"""Loads the CUDA library of this process: prebuilt, built by nvcc on first use, or on the SIMT shim. Torch-free.

Knows nothing of ops or models. It is looked for in this order:

    $BATON_CUDA_SIMT=1        the shim, for tests: the same code on the CPU, a thousand times slower
    $BATON_KERNELS_DIR        where ``python -m baton.kernels.cuda.build DIR`` put it, for images without nvcc
    nvcc                      built now, or by an earlier start
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from baton.kernels.abi import build as cpu
from baton.kernels.abi.native import CType
from baton.kernels.cuda import build

SIMT_ENV = "BATON_CUDA_SIMT"
P, I32, I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[CType, ...]] = {
    "session_open": (P, I64, P),
    "session_close": (P,),
    "session_bind": (P, P, I64, I64, P),
    "session_admit": (P, P, I64),
    "session_turns": (P, P, I64),
    "session_share": (P, I32),
    "session_upload": (P, P, I32),
    "session_run": (P, I32, I32, I32),
    "session_fetch": (P, P, I32),
    "session_read": (P, I32, I64, I64, P),
    "session_wait": (P,),
    "session_counts": (P, P),
    "megakernel_fits": (P, I32, P, P),
    "device_allocate": (I64, P),
    "device_release": (P,),
    "device_copy": (P, P, I64),
    "device_wait": (P,),
    "device_programmatic": (I32,),
    "device_pageable": (P,),
    "device_register": (P, I64),
    "device_unregister": (P,),
}


class DeviceError(RuntimeError):
    """Raised if a call of the library fails; the message is CUDA's, or the shim's."""


class CudaLibrary:
    """A loaded CUDA library, whose functions return 0 or an error status that it can describe."""

    def __init__(self, path: Path) -> None:
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.baton_device_error.restype = ctypes.c_char_p
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        for name, arguments in _FUNCTIONS.items():
            found = self._functions[name] = self.library[f"baton_{name}"]
            found.argtypes, found.restype = list(arguments), ctypes.c_int

    def call(self, name: str, *arguments: object) -> None:
        """Calls the function ``baton_<name>``. Raises DeviceError if it returns an error."""
        if status := self._functions[name](*arguments):
            said = (self.library.baton_device_error(status) or b"").decode(errors="replace")
            raise DeviceError(f"{name}: {said or 'failed'} (status {status})")

    def put(self, address: int, size: int) -> int:
        """Copies ``size`` bytes at host address ``address`` to new device memory; returns their device address.

        Raises DeviceError.
        """
        at = P()
        self.call("device_allocate", size, ctypes.byref(at))
        assert at.value is not None
        self.call("device_copy", at, address, size)
        return at.value

    def release(self, at: int) -> None:
        """Frees the device memory at address ``at``, which ``put`` returned. Raises DeviceError."""
        self.call("device_release", at)


def on_shim() -> bool:
    """Returns whether the SIMT shim is used in place of a GPU, as tests request."""
    return os.environ.get(SIMT_ENV) == "1"


@cache
def device() -> CudaLibrary:
    """Returns this process's CUDA library, loaded or built on the first call.

    Raises BuildError if nothing is built and there is no nvcc, or if it can't be loaded.
    """
    path = build.simt() if on_shim() else build.prebuilt() or build.library()
    try:
        return CudaLibrary(path)
    except (OSError, AttributeError) as error:
        raise cpu.BuildError(f"the CUDA kernels can't be loaded: {error}") from error
