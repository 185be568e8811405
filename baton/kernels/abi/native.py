"""Loads the native library for this machine's ISA, once per process, by ctypes. Torch-free.

Knows nothing of the ops: each declares its own functions with ``function``. If the library can't be built,
``library()`` is None, a warning is logged once, and the ops use their reference implementations.

    python -m baton.kernels.abi.native       builds it for this CPU, if it isn't built yet
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from baton.kernels.abi import tiles
from baton.kernels.abi.build import EMULATED, BuildError, built, is_built, refusal

log = logging.getLogger("baton.kernels")

ISA_ENV = "BATON_ISA"
REFERENCE = "reference"  # a value of $BATON_ISA: no native code at all
F32, BF16 = 0, 1  # common.h: Dtype
P, I32, I64, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
CType = type[ctypes.c_void_p] | type[ctypes.c_int32] | type[ctypes.c_int64] | type[ctypes.c_float]
NativeFunction = Callable[..., int | None]  # an exported symbol; None where it has no result
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512vbmi"}
_AVX2 = {"avx2", "fma", "f16c"}
_OLDER = {"avx_vnni": "avx2"}  # what is taken where a compiler is too old for an ISA
_NEEDS = {
    "amx": {*_AVX512, "amx_tile", "amx_int8", "amx_bf16"},
    "avx512": _AVX512,
    "avx_vnni": {*_AVX2, "avx_vnni"},
    "avx2": _AVX2,
    "plain": set[str](),
}


def able() -> list[str]:
    """Returns the ISAs that this CPU can run, widest first; ``plain`` is always among them."""
    return [name for name, needs in _NEEDS.items() if needs <= _cpu_flags()]


def testable() -> list[str]:
    """Returns the ISAs of ``able`` and, on AVX2 machines without AMX, the slow emulated AMX that only tests use."""
    have = able()
    return [*have, EMULATED] if "avx2" in have and "amx" not in have else have


@cache
def isa() -> str:
    """Returns the ISA to use: the widest of this CPU, or the one that $BATON_ISA names (amx, avx512, avx_vnni,
    avx2, plain, reference, or the slow amx-emulated).

    If the kernel refuses AMX tiles, it is avx512, and a warning is logged. Raises ValueError if the CPU can't run
    the named ISA.
    """
    asked = os.environ.get(ISA_ENV) or able()[0]
    if asked not in (*testable(), REFERENCE):
        raise ValueError(f"{ISA_ENV}={asked}: this CPU can run {', '.join(able())} (or {REFERENCE})")
    if asked == "amx" and (refusal := tiles.refusal()):
        log.warning("no AMX tiles, avx512 is used: %s", refusal)
        return "avx512"
    return asked


@cache
def library() -> ctypes.CDLL | None:
    """Returns the library for ``isa()``, built on first use; None if it can't be built or the ISA is
    "reference".
    """
    if isa() == REFERENCE:
        return None
    try:
        return load(newest(isa()))
    except (BuildError, OSError) as error:
        log.warning("no native kernels, the slower reference is used: %s", error)
        return None


def newest(wanted: str) -> Path:
    """Returns the library for ``wanted``, or for an older ISA that the compiler knows. Raises BuildError."""
    taken = known(wanted)
    try:
        return built(taken)
    except BuildError as error:
        if taken not in _OLDER:
            raise
        log.warning("no %s, %s is used: %s", taken, _OLDER[taken], error)
        return built(_OLDER[taken])


def known(wanted: str) -> str:
    """Returns ``wanted``, or an older ISA where the compiler is too old for it, which is logged.

    Raises BuildError if nothing is built and there is no compiler.
    """
    if wanted not in _OLDER:
        return wanted
    try:
        why = refusal(wanted)
    except BuildError as error:  # there is no compiler
        if not is_built(_OLDER[wanted]):
            raise
        why = str(error)
    if not why:
        return wanted
    log.warning("no %s, %s is used: %s", wanted, _OLDER[wanted], why)
    return _OLDER[wanted]


def load(path: Path) -> ctypes.CDLL:
    """Returns the library at ``path``, with the thread count of ``set_threads`` applied. Raises OSError."""
    found = ctypes.CDLL(str(path))
    found.baton_set_threads(I32(_threads))
    return found


_threads = len(os.sched_getaffinity(0))


def set_threads(count: int) -> None:
    """Sets the number of threads that each native op of this process uses, including the calling thread."""
    global _threads
    _threads = count
    if library.cache_info().currsize and (found := library()):
        found.baton_set_threads(I32(count))


def function(name: str, *arguments: CType, result: CType | None = None) -> NativeFunction:
    """Returns the library's function ``baton_<name>`` with its argument types declared.

    Raises RuntimeError if there is no library.
    """
    found = library()
    if found is None:
        raise RuntimeError(f"baton_{name}: there is no native library")
    return declare(found, name, *arguments, result=result)


def declare(library: ctypes.CDLL, name: str, *arguments: CType, result: CType | None = None) -> NativeFunction:
    """Returns the function ``baton_<name>`` of ``library`` with its argument types declared."""
    found = library[f"baton_{name}"]  # a fresh object each time: nobody else's declaration is changed
    found.argtypes, found.restype = list(arguments), result
    return found


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


if __name__ == "__main__":
    sys.exit(0 if library() is not None else 1)
