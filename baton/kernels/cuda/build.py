"""Builds the ops' ``cuda.cu``: by nvcc for a GPU, by g++ on the SIMT shim for a machine without one. Torch-free.

Knows nothing of what the ops compute. Everything is cached by a hash over the sources, the flags and the compiler,
as for the CPU (``abi/build.py``).

    python -m baton.kernels.cuda.build         compiles every cuda.cu for sm_90a and links the library for a GPU
    python -m baton.kernels.cuda.build simt    builds the same sources on the shim
    python -m baton.kernels.cuda.build DIR     builds, and copies the library to DIR for machines without nvcc,
                                               which find it by $BATON_KERNELS_DIR
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from baton.kernels.abi import build as cpu
from baton.kernels.abi import compiler as host
from baton.kernels.abi.build import KERNELS, BuildError, cache_dir
from baton.kernels.abi.compiler import cache_key, made, run_tool, version_of

ARCH = "sm_90a"
NVCC_ENV = "BATON_NVCC"
# -fmad=false: a product and a sum are rounded once where a source says fmaf, and nowhere else, as on the shim.
NVCC_FLAGS = ("-std=c++17", "-O3", f"-arch={ARCH}", "--expt-relaxed-constexpr", "-fmad=false", "-Xptxas", "-v")
# -arch=sm_90a makes an object's PTX for compute_90 too, which knows no wgmma: it fails there.
GPU_CODE = ("-gencode", "arch=compute_90a,code=sm_90a")
SIMT_FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-DBATON_SIMT"),
    *("-Wno-unknown-pragmas", "-Wno-psabi"),
)
# gcc's calls before each access of memory, answered by simt/race.cpp instead of its own runtime.
RACE_FLAGS = ("-fsanitize=thread",)
RUNTIME = KERNELS / "cuda" / "simt"
_INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"')
_OPENED = re.compile(r"^\s*#\s*if(?:(ndef\s+BATON_DEVICE\b)|)")
_CLOSED = re.compile(r"^\s*#\s*endif\b")
_PLANTED = "-DBATON_MUTATION_"  # how the flag of a planted bug begins


@dataclass(frozen=True)
class CompiledOp:
    """One op compiled for a GPU."""

    op: str
    cubin: Path
    ptxas: str  # what ptxas reported of each kernel


def ops() -> tuple[str, ...]:
    """Returns the names of the ops that have a ``cuda.cu``, sorted."""
    return tuple(sorted(path.parent.name for path in KERNELS.glob("*/cuda.cu")))


def source(op: str) -> Path:
    """Returns the path of the op's ``cuda.cu``."""
    return KERNELS / op / "cuda.cu"


def nvcc() -> str:
    """Returns the path of nvcc: $BATON_NVCC, or nvcc on PATH, or in /usr/local/cuda. Raises BuildError if there is
    none.
    """
    named = os.environ.get(NVCC_ENV)
    found = shutil.which(named) if named else shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not found:
        raise BuildError(
            f"no CUDA compiler ({named or 'nvcc'}) on PATH; install CUDA 12.4 or newer, or set {NVCC_ENV}"
        )
    return found


def cubins(names: Iterable[str] | None = None) -> list[CompiledOp]:
    """Returns the ops (all, or those named) compiled for sm_90a. Raises BuildError with the compiler's message."""
    compiler = nvcc()
    version = run_tool([compiler, "--version"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda op: _cubin(compiler, version, op), ops() if names is None else names))


def library(extra: tuple[str, ...] = (), lines: bool = True) -> Path:
    """Returns the path of the library for a GPU with all ops, built if needed; without ``lines`` profilers and
    compute-sanitizer can't tell source lines, and it takes half the bytes. Raises BuildError.
    """
    compiler = nvcc()
    plain = [flag for flag in NVCC_FLAGS[:-2] if not flag.startswith("-arch=")]
    told = ("-lineinfo",) if lines else ()
    flags = (*plain, *GPU_CODE, "-Xcompiler", "-fPIC,-fvisibility=hidden", *told)
    tag = f"{compiler} {run_tool([compiler, '--version'])} {flags}".encode()

    def compiled(op: str) -> Path:
        mine = [flag for flag in extra if _concerns(flag, source(op))]
        path = _folder("gpu") / f"{op}-{_key(tag + str(mine).encode(), source(op))}.o"
        return made(path, [compiler, *flags, *mine, "-c", str(source(op))])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, ops()))
    key = cache_key(tag, *(str(path).encode() for path in objects))
    link = [compiler, *GPU_CODE, "-shared", "-cudart", "static", *map(str, objects)]
    return made(_folder("gpu") / f"baton-cuda-{key}.so", link)


def simt(names: Iterable[str] | None = None, extra: tuple[str, ...] = (), races: bool = False) -> Path:
    """Returns the path of a library of the ops (all, or those named) on the shim; ``races`` adds checks for data
    races.

    With $BATON_CUDA_ON_GPU=1 (on_gpu.py) it is the library for a GPU, prebuilt if there is one. Raises BuildError.
    """
    if os.environ.get("BATON_CUDA_ON_GPU") == "1":
        return (None if extra else prebuilt()) or library(extra)
    return on_shim([source(op) for op in (ops() if names is None else names)], extra, races)


def prebuilt_name() -> str:
    """Returns the file name of a GPU library built on another machine, by the sources and the flags, whatever the
    compiler.
    """
    found = sorted({each for op in ops() for each in sources(source(op))})
    return f"baton-cuda-{cache_key(str(NVCC_FLAGS).encode(), *(path.read_bytes() for path in found))}.so"


def prebuilt() -> Path | None:
    """Returns the path of the library for the present sources in $BATON_KERNELS_DIR; None if there is none."""
    named = os.environ.get(cpu.PREBUILT_ENV)
    path = Path(named, prebuilt_name()) if named else None
    return path if path is not None and path.exists() else None


def on_shim(kernels: Iterable[Path], extra: tuple[str, ...] = (), races: bool = False) -> Path:
    """Returns the path of a library of the given .cu files on the shim; ``races`` adds checks for data races.

    Raises BuildError.
    """
    compiler, flags = host.compiler(), (*SIMT_FLAGS, *(("-DBATON_SIMT_RACE",) if races else ()))
    version = version_of(compiler)

    def compiled(path: Path) -> Path:
        concerned = [flag for flag in extra if _concerns(flag, path)]
        if any(flag.startswith(_PLANTED) for flag in concerned):
            concerned.append("-DBATON_PLANTED")
        mine = (*flags, *concerned, *(RACE_FLAGS if races else ())) if path.suffix == ".cu" else flags
        name = f"{path.parent.name}-{path.stem}-{_key(f'{compiler} {version} {mine}'.encode(), path)}.o"
        return made(_folder("simt") / name, [compiler, *mine, "-x", "c++", "-c", str(path)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [*kernels, *sorted(RUNTIME.glob("*.cpp"))]))
    key = cache_key(*(str(path).encode() for path in objects))
    return made(_folder("simt") / f"baton-simt-{key}.so", [compiler, "-shared", "-pthread", *map(str, objects)])


def _concerns(flag: str, path: Path) -> bool:
    """Returns whether a flag can change what ``path`` compiles to: one op's planted bug leaves others' objects
    alone.
    """
    if not flag.startswith(_PLANTED):
        return True
    return any(flag.removeprefix("-D") in each.read_text() for each in sources(path))


def _device_includes(text: str) -> list[str]:
    """Returns the headers of ours that a text includes if BATON_DEVICE is defined, as in every ``cuda.cu``.

    Headers keep what is only for a CPU between ``#ifndef BATON_DEVICE`` and ``#endif``. Both branches of other
    conditions count.
    """
    found: list[str] = []
    conditions: list[str] = []  # that the line stands under, "cpu" for a CPU's alone
    for line in text.splitlines():
        if opened := _OPENED.match(line):
            conditions.append("cpu" if opened.group(1) else "")
        elif _CLOSED.match(line):
            conditions.pop()
        elif "cpu" not in conditions:
            found += _INCLUDE.findall(line)
    return found


def sources(path: Path) -> list[Path]:
    """Returns ``path`` and, sorted after it, every header of ours that it includes for a device, directly or
    not.
    """
    found, ahead = {path.resolve()}, [path.resolve()]
    while ahead:
        here = ahead.pop()
        for name in _device_includes(here.read_text()):
            header = (here.parent / name).resolve()
            if header.exists() and header not in found:
                found.add(header)
                ahead.append(header)
    return [path, *sorted(found - {path.resolve()})]


def source_key(op: str) -> str:
    """Returns a hash, 16 hex digits, of the op's ``cuda.cu`` and of every header of ours that it includes, directly
    or not.
    """
    return hashlib.sha256(b"".join(each.read_bytes() for each in sources(source(op)))).hexdigest()[:16]


def _cubin(compiler: str, version: str, op: str) -> CompiledOp:
    path = _folder("cubin") / f"{op}-{_key(f'{version} {NVCC_FLAGS}'.encode(), source(op))}.cubin"
    log = path.with_suffix(".log")
    if not (path.exists() and log.exists()):
        said = _said([compiler, *NVCC_FLAGS, "-cubin", str(source(op)), "-o", str(path)])
        log.write_text(said)
    return CompiledOp(op, path, log.read_text())


def _said(command: list[str]) -> str:
    """Runs ``command`` and returns its stderr, which has ptxas' report. Raises BuildError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stderr


def _key(tag: bytes, path: Path) -> str:
    return cache_key(tag, *(each.read_bytes() for each in sources(path)))


def _folder(name: str) -> Path:
    folder = cache_dir() / "cuda" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{error}; set {cpu.CACHE_ENV} to a directory that can be written") from error
    return folder


def keep_in(folder: Path, lines: bool = True) -> Path:
    """Builds the library, with source ``lines`` or without, and copies it to ``folder`` for machines without nvcc;
    returns its path there.

    Raises BuildError and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(library(lines=lines), folder / prebuilt_name()))


def exit_status(check: Callable[[], list[str]], what: str) -> int:
    """Prints the messages of ``check`` on stderr; returns 1 if there are any, or if ``what`` can't be checked, else
    0.
    """
    try:
        said = check()
    except BuildError as error:
        said = [f"{what} was not checked: {error}"]
    for line in said:
        print(line, file=sys.stderr)
    return int(bool(said))


def main() -> int:
    """Builds what the arguments ask for; returns exit status 1 if that fails, else 0."""
    try:
        if sys.argv[1:] == ["simt"]:
            print(f"simt: {simt()}")
            return 0
        if sys.argv[1:]:
            print(keep_in(Path(sys.argv[1])))
            return 0
        for made in cubins():
            print(f"{made.op}: {made.cubin}")
        print(f"library: {library()}")
    except (BuildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
