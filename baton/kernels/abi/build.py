"""Builds the ops' C++ into one shared library per ISA, once per machine. Torch-free.

Knows nothing of what the ops compute. The library's name in the cache is a hash over all sources, the flags and the
compiler, so that a stale one is never loaded; objects are cached in the same way, so that an edit recompiles one
file. Builders take a lock; readers need none, because files appear by an atomic rename.

    python -m baton.kernels.abi.build        builds for each ISA, except emulated ones (make kernels)
    python -m baton.kernels.abi.build DIR    also copies the libraries to DIR, for machines without a compiler: an
                                             image sets $BATON_KERNELS_DIR to it, which is searched first
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from baton.kernels.abi.compiler import BuildError as BuildError
from baton.kernels.abi.compiler import cache_key, compiler, made, run_tool, version_of
from baton.places import CACHE_ENV as CACHE_ENV
from baton.places import cache_dir as cache_dir

KERNELS = Path(__file__).parents[1]
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16", "vbmi"))
AMX = tuple(f"-mamx-{part}" for part in ("tile", "int8", "bf16"))
EMULATED = "amx-emulated"  # AVX2's forms beside emulated tiles (amx_emulator.h): for tests on machines without AMX
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*AVX2, *AVX512, *AMX),
    "avx512": (*AVX2, *AVX512),
    "avx_vnni": (*AVX2, "-mavxvnni"),
    "avx2": AVX2,
    "plain": (),
    EMULATED: (*AVX2, "-DBATON_EMULATED_TILES"),
}
# No contraction: a multiply and an add that one path fuses and another doesn't would give a row different bits
# in different batches. The kernels fuse by hand.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off")
PREBUILT_ENV = "BATON_KERNELS_DIR"  # the variable that names a folder of libraries built elsewhere


def built(isa: str, extra: tuple[str, ...] = ()) -> Path:
    """Returns the path of the library for ``isa``, built if needed; ``extra`` compiler flags make a separate
    library.

    Raises BuildError.
    """
    flags = (*FLAGS, *ISA_FLAGS[isa], *extra)
    if (found := _prebuilt(isa, flags)) is not None:
        return found
    tool = compiler()
    library, objects = _wanted(isa, tool, flags)
    if not library.exists():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    _build(tool, flags, objects, library)
        except OSError as error:
            raise BuildError(f"{error}; set {CACHE_ENV} to a directory that can be written") from error
    return library


def is_built(isa: str) -> bool:
    """Returns whether the library for ``isa`` exists. Raises BuildError if it doesn't and there is no compiler."""
    flags = (*FLAGS, *ISA_FLAGS[isa])
    return _prebuilt(isa, flags) is not None or _wanted(isa, compiler(), flags)[0].exists()


def refusal(isa: str) -> str:
    """Returns why the compiler doesn't know the instructions of ``isa``, in its own words; empty if it does, or if
    the library exists already.

    The compiler is asked by an empty file, which takes milliseconds. Raises BuildError if there is none.
    """
    if is_built(isa):
        return ""
    try:
        run_tool([compiler(), *ISA_FLAGS[isa], "-E", "-x", "c++", os.devnull])
    except BuildError as error:
        return str(error)
    return ""


def _wanted(isa: str, tool: str, flags: tuple[str, ...]) -> tuple[Path, dict[Path, str]]:
    """Returns the path of the library for the present sources, and the cache key of each source's object."""
    tag = f"{tool} {version_of(tool)} {flags}".encode()
    headers = b"".join(path.read_bytes() for path in cpu_sources(".h"))
    objects = {path: cache_key(tag, headers, path.read_bytes()) for path in cpu_sources(".cpp")}
    name = f"baton-{isa}-{cache_key(tag, *map(str.encode, objects.values()))}.so"
    return cache_dir() / "kernels" / name, objects


def prebuilt_name(isa: str, flags: tuple[str, ...]) -> str:
    """Returns the file name of a library built on another machine, by the sources and the flags, whatever the
    compiler.
    """
    return f"baton-{isa}-prebuilt-{cache_key(str(flags).encode(), *_sources())}.so"


def sources_key() -> str:
    """Returns a short digest of the kernels' sources, the same on every machine that has them."""
    return cache_key(*_sources())


def _sources() -> Iterator[bytes]:
    return (path.read_bytes() for path in (*cpu_sources(".h"), *cpu_sources(".cpp")))


def _prebuilt(isa: str, flags: tuple[str, ...]) -> Path | None:
    folder = os.environ.get(PREBUILT_ENV)
    path = Path(folder, prebuilt_name(isa, flags)) if folder else None
    return path if path is not None and path.exists() else None


def cpu_sources(ending: str) -> list[Path]:
    """Returns the sources of the CPU kernels whose names end with ``ending``, sorted."""
    return sorted(path for path in KERNELS.rglob(f"*{ending}") if "simt" not in path.parts)


def _build(tool: str, flags: tuple[str, ...], objects: dict[Path, str], library: Path) -> None:
    def compiled(item: tuple[Path, str]) -> Path:
        source, key = item
        return made(library.parent / f"{key}.o", [tool, *flags, "-c", str(source)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(compiled, objects.items()))
    made(library, [tool, "-shared", "-pthread", *map(str, parts)])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Builds every library; returns exit status 1 if one fails, else 0."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for isa, flags in ISA_FLAGS.items():
        if isa == EMULATED:
            continue
        try:
            library = built(isa)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                library = Path(shutil.copy(library, folder / prebuilt_name(isa, (*FLAGS, *flags))))
            print(f"{isa}: {library}")
        except BuildError as error:
            print(f"{isa}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
