"""Loads the CUDA library of this process: prebuilt, built by nvcc on first use, or on the SIMT shim. Torch-free.

Knows nothing of ops or models. It is looked for in this order:

    $BATON_CUDA_SIMT=1        the shim, for tests: the same code on the CPU, a thousand times slower
    $BATON_KERNELS_DIR        where ``python -m baton.kernels.cuda.build DIR`` put it, for images without nvcc
    nvcc                      built now, or by an earlier start

For tests, $BATON_CUDA_PROCESSORS is how many multiprocessors dispatch takes the device to have, and
$BATON_CUDA_LAUNCHES=1 makes a library note which kernels it launches.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from baton.kernels.abi import build as cpu
from baton.kernels.abi.native import CType
from baton.kernels.cuda import build, names

SIMT_ENV = "BATON_CUDA_SIMT"
PROCESSORS_ENV, LAUNCHES_ENV = "BATON_CUDA_PROCESSORS", "BATON_CUDA_LAUNCHES"
P, I32, I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[CType, ...]] = {
    "session_open": (P, I64, P),
    "session_close": (P,),
    "session_on_demand": (P,),
    "session_bind": (P, P, I64, I64, P),
    "session_admit": (P, P, I64),
    "session_fetch_pages": (P, P, I64),
    "session_angles": (P, P, I64),
    "session_share": (P, I32),
    "session_branches": (P, P, I32),
    "session_ahead": (P, P, I32),
    "session_upload": (P, P, I32),
    "session_run": (P, I32, I32, I32),
    "session_fetch": (P, P, I32),
    "session_begin_fetch": (P, P, I32),
    "session_end_fetch": (P, P, I32),
    "session_read": (P, I32, I64, I64, P),
    "session_wait": (P,),
    "session_counts": (P, P),
    "session_join": (P, P, P),
    "room_make": (I64, P, P),
    "room_open": (P, I64, P),
    "room_close": (P, I64, I32),
    "room_lost": (P, P),
    "card_use": (I32,),
    "card_count": (P,),
    "card_reaches": (I32, P),
    "megakernel_fits": (P, I32, P, P),
    "device_allocate": (I64, P),
    "device_release": (P,),
    "device_copy": (P, P, I64),
    "device_wait": (P,),
    "device_programmatic": (I32,),
    "device_pageable": (P,),
    "device_register": (P, I64),
    "device_unregister": (P,),
    "linear_library": (P, P),
    "linear_ways": (I64, I64, I32, P, P, I64),
}


# What any library has, whatever its ops (device.cuh).
_REHEARSAL = {"device_processors": (I32,), "device_note": (I32,), "device_noted": (P, I64, P)}
_NOTING: dict[str, Rehearsal] = {}  # libraries of this process that note their launches, by path
_NOTED: set[str] = set()  # what they launched before they forgot it


class Rehearsal:
    """Tests' hold on a loaded library: for how many multiprocessors it dispatches, and which kernels it launched.

    Follows $BATON_CUDA_PROCESSORS and $BATON_CUDA_LAUNCHES from the start.
    """

    def __init__(self, path: Path, library: ctypes.CDLL) -> None:
        self._path = str(path)
        self._functions = {name: library[f"baton_{name}"] for name in _REHEARSAL}
        for name, arguments in _REHEARSAL.items():
            self._functions[name].argtypes = list(arguments)
        if wanted := processors_wanted():
            self.processors(wanted)
        if os.environ.get(LAUNCHES_ENV) == "1" and self._path not in _NOTING:
            self.note()
            _NOTING[self._path] = self

    def processors(self, count: int) -> None:
        """Makes dispatch and grids take the device to have ``count`` multiprocessors; 0: as many as it has."""
        self._functions["device_processors"](count)

    def note(self) -> None:
        """Begins to note launches; ``launched`` forgets those noted before."""
        if self._path in _NOTING:
            _NOTED.update(self.launched())
        self._functions["device_note"](1)

    @contextmanager
    def dispatching(self, count: int) -> Iterator[Rehearsal]:
        """Dispatches for ``count`` multiprocessors in the block, of which ``launched`` then tells."""
        self.processors(count)
        self.note()
        try:
            yield self
        finally:
            self.processors(processors_wanted())

    def launched(self) -> frozenset[str]:
        """Returns the kernels that were launched since ``note``, as "op kernel<2, 4>". Those of a build with a
        planted bug don't count.
        """
        needed = I64()
        self._functions["device_noted"](None, 0, ctypes.byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        self._functions["device_noted"](text, needed, ctypes.byref(needed))
        return frozenset(map(names.noted, text.value.decode().splitlines()))


def processors_wanted() -> int:
    """Returns $BATON_CUDA_PROCESSORS, 0 where it isn't set. Raises BuildError where it is no count."""
    told = os.environ.get(PROCESSORS_ENV, "0")
    if not told.isdecimal():
        raise cpu.BuildError(f"{PROCESSORS_ENV}: {told!r} is no number of multiprocessors; give one, or unset it")
    return int(told)


def launched() -> frozenset[str]:
    """Returns the kernels that all libraries of this process have launched that note them."""
    return frozenset(_NOTED).union(*(each.launched() for each in _NOTING.values()))


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
        self.rehearsal = Rehearsal(path, self.library)

    def call(self, name: str, *arguments: object) -> None:
        """Calls the function ``baton_<name>``. Raises DeviceError if it returns an error."""
        if status := self._functions[name](*arguments):
            said = (self.library.baton_device_error(status) or b"").decode(errors="replace")
            raise DeviceError(f"{name}: {said or 'failed'} (status {status})")

    def put(self, address: int, size: int) -> int:
        """Copies ``size`` bytes at host address ``address`` to new device memory; returns their device address.

        Raises DeviceError.
        """
        at = self.allocate(size)
        self.copy(at, address, size)
        return at

    def allocate(self, size: int) -> int:
        """Returns the address of ``size`` bytes of new device memory. Raises DeviceError."""
        at = P()
        self.call("device_allocate", size, ctypes.byref(at))
        assert at.value is not None
        return at.value

    def copy(self, at: int, address: int, size: int) -> None:
        """Copies ``size`` bytes at host address ``address`` to device address ``at``. Raises DeviceError."""
        self.call("device_copy", at, address, size)

    def release(self, at: int) -> None:
        """Frees the device memory at address ``at``, which ``allocate`` or ``put`` returned. Raises DeviceError."""
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
