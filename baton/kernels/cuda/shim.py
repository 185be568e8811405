"""Gives a library of ops on the SIMT shim the interface of the CPU's: same names, same arguments. Torch-free.

Knows nothing of the ops. The trailing stream argument is added here, and a launch that failed (a deadlock, a race)
raises ``SimtError`` with the shim's message. A suite that takes a ``ctypes.CDLL`` also takes a ``Simt``.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import weakref
from pathlib import Path
from typing import cast

from baton.kernels.abi.native import CType
from baton.kernels.cuda import on_gpu
from baton.kernels.cuda.library import Rehearsal


class SimtError(AssertionError):
    """Raised if the shim finds an error in a kernel or refuses a launch; the message is the shim's."""


class ShimFunction:
    """Calls one exported op with ``argtypes`` as of the CPU's function. Raises SimtError."""

    def __init__(self, library: Simt, name: str) -> None:
        self._library, self._call = library, library.library[name]
        self.argtypes: list[CType] = []
        self.restype: CType | None = None

    def __call__(self, *arguments: object) -> None:
        self._call.argtypes, self._call.restype = [*self.argtypes, ctypes.c_void_p], ctypes.c_int
        if status := self._call(*arguments, None):
            raise SimtError(f"status {status}: {self._library.error()}")


class Simt:
    """The library at ``path``, whose thread schedules are drawn with ``seed``.

    ``preempt`` is how often, in thousandths, a thread yields where it may; ``blocks`` are resident at once.
    """

    def __init__(self, path: Path, seed: int = 1, preempt: int = 0, blocks: int = 2) -> None:
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.baton_simt_error.restype = ctypes.c_char_p
        self.library.baton_simt_launches.restype = ctypes.c_uint64
        self.rehearsal = Rehearsal(path, self.library)
        self.schedule(seed, preempt, blocks)
        weakref.finalize(self, self.library.baton_simt_rest).atexit = False

    def schedule(self, seed: int, preempt: int = 0, blocks: int = 2) -> None:
        """Sets the seed and the parameters of the schedules of following launches (see the class)."""
        self.library.baton_simt_configure(ctypes.c_uint64(seed), ctypes.c_int32(preempt), ctypes.c_int32(blocks))

    def error(self) -> str:
        """Returns the error of the last failed launch, with the source line if binutils are installed."""
        text = (self.library.baton_simt_error() or b"").decode()
        found = re.search(r"\[(0x[0-9a-f]+)\]$", text)
        if found is None or not (tool := shutil.which("addr2line")):
            return text
        command = [tool, "-s", "-e", str(self.path), found[1]]
        return (
            text[: found.start()]
            + subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        )

    def launches(self) -> int:
        """Returns the number of kernel launches so far, by which a suite shows that it ran on the shim."""
        return int(self.library.baton_simt_launches())

    def __getitem__(self, name: str) -> ShimFunction:
        return ShimFunction(self, name)


def as_library(path: Path, seed: int = 1, preempt: int = 0, blocks: int = 2) -> ctypes.CDLL:
    """Returns the shim's library, typed as what the suites take; with $BATON_CUDA_ON_GPU=1 one that runs on a
    GPU.
    """
    if on_gpu.asked():
        return cast(ctypes.CDLL, on_gpu.OnGpu(path))
    return cast(ctypes.CDLL, Simt(path, seed, preempt, blocks))
