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
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

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
COMPILER_ENV, PREBUILT_ENV = "BATON_CXX", "BATON_KERNELS_DIR"


class BuildError(Exception):
    """Raised if a library can't be built; the message is that no compiler was found, or the compiler's own."""


def built(isa: str, extra: tuple[str, ...] = ()) -> Path:
    """Returns the path of the library for ``isa``, built if needed; ``extra`` compiler flags make a separate
    library.

    Raises BuildError.
    """
    flags = (*FLAGS, *ISA_FLAGS[isa], *extra)
    if (found := _prebuilt(isa, flags)) is not None:
        return found
    compiler = _compiler()
    library, objects = _wanted(isa, compiler, flags)
    if not library.exists():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    _build(compiler, flags, objects, library)
        except OSError as error:
            raise BuildError(f"{error}; set {CACHE_ENV} to a directory that can be written") from error
    return library


def is_built(isa: str) -> bool:
    """Returns whether the library for ``isa`` exists. Raises BuildError if it doesn't and there is no compiler."""
    flags = (*FLAGS, *ISA_FLAGS[isa])
    return _prebuilt(isa, flags) is not None or _wanted(isa, _compiler(), flags)[0].exists()


def refusal(isa: str) -> str:
    """Returns why the compiler doesn't know the instructions of ``isa``, in its own words; empty if it does, or if
    the library exists already.

    The compiler is asked by an empty file, which takes milliseconds. Raises BuildError if there is none.
    """
    if is_built(isa):
        return ""
    try:
        _run([_compiler(), *ISA_FLAGS[isa], "-E", "-x", "c++", os.devnull])
    except BuildError as error:
        return str(error)
    return ""


def _wanted(isa: str, compiler: str, flags: tuple[str, ...]) -> tuple[Path, dict[Path, str]]:
    """Returns the path of the library for the present sources, and the cache key of each source's object."""
    tag = f"{compiler} {_version(compiler)} {flags}".encode()
    headers = b"".join(path.read_bytes() for path in cpu_sources(".h"))
    objects = {path: _key(tag, headers, path.read_bytes()) for path in cpu_sources(".cpp")}
    name = f"baton-{isa}-{_key(tag, *map(str.encode, objects.values()))}.so"
    return cache_dir() / "kernels" / name, objects


def prebuilt_name(isa: str, flags: tuple[str, ...]) -> str:
    """Returns the file name of a library built on another machine, by the sources and the flags, whatever the
    compiler.
    """
    return f"baton-{isa}-prebuilt-{_key(str(flags).encode(), *_sources())}.so"


def sources_key() -> str:
    """Returns a short digest of the kernels' sources, the same on every machine that has them."""
    return _key(*_sources())


def _sources() -> Iterator[bytes]:
    return (path.read_bytes() for path in (*cpu_sources(".h"), *cpu_sources(".cpp")))


def _prebuilt(isa: str, flags: tuple[str, ...]) -> Path | None:
    folder = os.environ.get(PREBUILT_ENV)
    path = Path(folder, prebuilt_name(isa, flags)) if folder else None
    return path if path is not None and path.exists() else None


def cpu_sources(ending: str) -> list[Path]:
    """Returns the sources of the CPU kernels whose names end with ``ending``, sorted."""
    return sorted(path for path in KERNELS.rglob(f"*{ending}") if "simt" not in path.parts)


def _key(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _compiler() -> str:
    named = os.environ.get(COMPILER_ENV)
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not found:
        raise BuildError(f"no C++ compiler ({named or 'g++, c++, clang++'}) on PATH")
    return found


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).splitlines()[0]


def _build(compiler: str, flags: tuple[str, ...], objects: dict[Path, str], library: Path) -> None:
    def compiled(item: tuple[Path, str]) -> Path:
        source, key = item
        return _made(library.parent / f"{key}.o", [compiler, *flags, "-c", str(source)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(compiled, objects.items()))
    _made(library, [compiler, "-shared", "-pthread", *map(str, parts)])


def _made(path: Path, command: list[str]) -> Path:
    """Returns ``path``, made if missing by running ``command`` with a temporary file as its -o, then renaming
    that.
    """
    if path.exists():
        return path
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        _run([*command, "-o", temporary])
        Path(temporary).chmod(0o755)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout


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
