"""Turns kernels' mangled names into those of the sources.

Knows nothing of what is said about a kernel. ``_ZN5baton…6appendILi3ELi8EEEvNS0_4CallE`` becomes ``append<3, 8>``,
without the hash of the file that nvcc puts into names in anonymous namespaces.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def short(mangled: str) -> str:
    """Returns the kernel's name without namespaces and arguments, but with its template arguments."""
    plain = re.sub(r"\(anonymous namespace\)::|\bbaton::|^void ", "", _demangled(mangled))
    return re.sub(r"\(int\)", "", plain[: _arguments_at(plain)])


def named(wanted: Mapping[str, T], kernels: Iterable[str]) -> tuple[list[tuple[str, T]], list[str]]:
    """Returns each of ``kernels`` that a glob in ``wanted`` names, with what is wanted of it, and a message for
    each glob that names none.
    """
    known = list(kernels)
    found = {glob: [name for name in known if fnmatchcase(name, glob)] for glob in wanted}
    missing = [f"no kernel is named {glob}" for glob, names in found.items() if not names]
    return [(name, wanted[glob]) for glob, names in found.items() for name in names], missing


def noted(line: str) -> str:
    """Returns "op kernel<2, 4>" for a line that a library noted of a launch: the file with BATON_LAUNCH, a tab, and
    what the compiler calls the function ``kernel_name`` (device.cuh).
    """
    file, _, said = line.partition("\t")
    found = re.search(r"\[with auto Kernel = (.*)\]$", said)
    plain = re.sub(r"\{anonymous\}::|_GLOBAL__N__\w+::|\bbaton::|\bsimt::", "", found[1] if found else said)
    plain = re.sub(r"\((?:int|\w*Kind|\w*Type)\)", "", plain).replace("short unsigned int", "unsigned short")
    return f"{Path(file).parent.name} {plain}"


def _arguments_at(name: str) -> int:
    """Returns the index of the first parenthesis outside of template arguments, where the argument list begins."""
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth:
            return at
    return len(name)


@cache
def _demangled(mangled: str) -> str:
    found = ctypes.util.find_library("stdc++")
    if found is None:
        return mangled
    demangle = ctypes.CDLL(found)["__cxa_demangle"]
    demangle.restype = ctypes.c_void_p
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    status = ctypes.c_int()
    at = demangle(mangled.encode(), None, None, ctypes.byref(status))
    if status.value or not at:
        return mangled
    text = ctypes.cast(at, ctypes.c_char_p).value or b""
    ctypes.CDLL(None).free(ctypes.c_void_p(at))
    return text.decode()
