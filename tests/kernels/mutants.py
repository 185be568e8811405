"""Libraries with a planted bug, and whether a suite notices. Knows nothing of any op.

Only the named sources are compiled, with one BATON_MUTATION_… defined; a library is kept in the cache like the real
one, so that a second run compiles nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable

from baton.kernels.abi import build, native
from baton.kernels.abi.compiler import cache_key, compiler, made

QUICKLY = ("-O1",)  # behind the op's own -O3: a bug is one at any, and linear takes a third of the time to compile


def mutant(name: str, sources: Collection[str], isa: str | None = None) -> ctypes.CDLL:
    """The sources (folders under kernels/) and the pool of threads, built with BATON_MUTATION_``name``.

    ``NONE`` has no bug, and is compiled as the real library is.
    """
    flags = (*build.FLAGS, *build.ISA_FLAGS[isa or native.isa()], f"-DBATON_MUTATION_{name}")
    flags += () if name == "NONE" else QUICKLY
    paths = [build.KERNELS / source / "cpu.cpp" for source in sources]
    paths += [build.KERNELS / "collective" / "links.cpp"] if "collective" in sources else []
    paths += [build.KERNELS / "abi" / f"{name}.cpp" for name in ("threads", "amx")]
    headers = b"".join(path.read_bytes() for path in build.cpu_sources(".h"))
    key = cache_key(str(flags).encode(), headers, *(path.read_bytes() for path in paths))
    library = build.cache_dir() / "mutants" / f"{name}-{key}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler(), *flags, "-shared", *map(str, paths)]
    return native.load(made(library, command))


def sound(sources: Collection[str], isa: str) -> ctypes.CDLL:
    """Loads the ops without a bug, for any ISA; for this CPU's best nothing is compiled that isn't there."""
    own = native.library() if isa == native.isa() else None
    return own or mutant("NONE", sources, isa)


def is_caught(library: ctypes.CDLL, checks: Iterable[Callable[[ctypes.CDLL], None]]) -> bool:
    """Returns whether any of ``checks`` fails on ``library``."""
    for check in checks:
        try:
            check(library)
        except AssertionError:
            return True
    return False
