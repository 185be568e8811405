"""Makes the folder that bench/on_card.py takes along to a GPU: wheels for its Python, libraries, the commit.

    python -m bench.cuda.carry FOLDER [--python 3.12] [--there NAME,NAME] [--no-libraries] [--lines]
                                   [--plain]

Knows nothing of the machine there, but that it has torch with CUDA. Wheels are of the versions that are installed
here, for the other Python; what comes with torch (numpy, its own needs) stays there. The CUDA library is compiled
where nvcc is here, the CPU's for every instruction set. Needs a package index. All of it goes into one compressed
file; ``--plain`` leaves files, for a Python there without lzma. Source lines, by which compute-sanitizer tells
where, are half of the CUDA library and stay here but with ``--lines``.
"""

from __future__ import annotations

import argparse
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from baton.kernels.abi import build as cpu
from baton.kernels.abi.build import KERNELS, BuildError
from baton.kernels.cuda.build import keep_in
from bench.cuda.rows import commit
from bench.on_card import PACKED

PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64")
PRESET = 9  # of xz, whose window of 64 MiB then spans all files
DEBUG = b".debug_info"  # a section's name; some wheels' libraries are mostly of such
MOST_BYTES = 64 << 20  # of what is carried along, the checkout included
# What is wanted there: ours with its needs, and what the tests import. What torch brings stays as it is there.
WANTED = (
    "baton-serve", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors",
    "gguf",
)  # fmt: skip
# hf-xet downloads models, and there is no network.
LEFT_OUT = {"baton-serve", "torch", "numpy", "ray", "setuptools", "triton", "pip", "hf-xet"}


def pins(wanted: Sequence[str] = WANTED, there: Sequence[str] = ()) -> list[str]:
    """Returns name==version of all that is needed and installed here, by the packages' own lists; what is ``there``
    already is left out.
    """
    found: dict[str, str] = {}
    waiting = list(wanted)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found or (name in LEFT_OUT and name not in wanted):
            continue
        found[name] = _version(name)
        waiting += _needs(name)
    left_out = LEFT_OUT | set(there)
    return sorted(f"{name}=={version}" for name, version in found.items() if version and name not in left_out)


def _version(name: str) -> str:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


def _needs(name: str) -> Iterator[str]:
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return
    for line in lines:
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield need.name
            for extra in need.extras:
                yield from _extra(need.name, extra)


def _extra(name: str, extra: str) -> Iterator[str]:
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return
    for need in map(Requirement, lines):
        if (
            need.marker is not None
            and need.marker.evaluate({"extra": extra})
            and not need.marker.evaluate({"extra": ""})
        ):
            yield need.name


def download(folder: Path, python: str, wanted: Sequence[str]) -> None:
    """Fetches a wheel of each, for ``python``. Raises CalledProcessError where one has none."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.whl"):
        path.unlink()  # two versions of one package would stop the whole install
    flags = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    platforms = [flag for name in PLATFORMS for flag in ("--platform", name)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *flags, *platforms, "-d", str(folder), *wanted], check=True
    )
    print(f"{len(list(folder.glob('*.whl')))} wheels")


def libraries(folder: Path, lines: bool) -> None:
    """Builds the library for a GPU, with source ``lines`` or without, and those for every CPU; says what can't be
    built here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        print(f"for a GPU: {keep_in(folder, lines).name}")
    except BuildError as error:
        print(f"left out: the library for a GPU: {str(error).splitlines()[0]}", file=sys.stderr)
    for isa, flags in cpu.ISA_FLAGS.items():
        if isa == cpu.EMULATED:
            continue  # tests' alone
        name = cpu.prebuilt_name(isa, (*cpu.FLAGS, *flags))
        print(f"for {isa}: {Path(shutil.copy(cpu.built(isa), folder / name)).name}")


def pack(parts: Path, to: Path) -> None:
    """Writes all files of ``parts`` into one archive. Wheels are stored in it without compression of their own, so
    that xz finds what they and the libraries have in common: that takes less than half of the bytes.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(to, "wb", preset=PRESET) as squeezed, tarfile.open(fileobj=squeezed, mode="w") as archive:
        for path in sorted(path for path in parts.rglob("*") if path.is_file()):
            data = _stored(path) if path.suffix == ".whl" else path.read_bytes()
            member = tarfile.TarInfo(str(path.relative_to(parts)))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _stored(wheel: Path) -> bytes:
    """Returns ``wheel`` with the same files, none of them compressed, libraries without what debuggers read."""
    made = io.BytesIO()
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as after:
        for info in before.infolist():
            data = before.read(info)
            if info.filename.endswith(".so") and DEBUG in data:
                data = without_debug(data)
            info.compress_type = zipfile.ZIP_STORED
            after.writestr(info, data)
    return made.getvalue()


def without_debug(library: bytes) -> bytes:
    """Returns a shared ``library`` without its debug sections, where binutils' strip is here and takes it."""
    tool = shutil.which("strip")
    if tool is None:
        return library
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        path.write_bytes(library)
        done = subprocess.run([tool, "--strip-debug", str(path)], capture_output=True, check=False)
        return path.read_bytes() if done.returncode == 0 else library


def main() -> int:
    """Makes the folder; returns 1 where it is too large to be carried."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version there (3.12)")
    parser.add_argument("--there", default="", help="packages that the machine has in versions that will do")
    parser.add_argument("--no-libraries", action="store_true", help="wheels alone")
    parser.add_argument("--lines", action="store_true", help="source lines for compute-sanitizer")
    parser.add_argument("--plain", action="store_true", help="files, not one archive of them")
    asked = parser.parse_args()
    parts = asked.folder if asked.plain else asked.folder.with_name(f"{asked.folder.name}.parts")
    download(parts / "wheels", asked.python, pins(there=asked.there.lower().split(",")))
    shutil.rmtree(parts / "kernels", ignore_errors=True)  # of other sources
    if not asked.no_libraries:
        libraries(parts / "kernels", asked.lines)
    if asked.plain:
        (asked.folder / PACKED).unlink(missing_ok=True)
    else:
        for old in ("wheels", "kernels"):  # of an earlier --plain
            shutil.rmtree(asked.folder / old, ignore_errors=True)
        pack(parts, asked.folder / PACKED)
    (asked.folder / "commit").write_text(commit() + "\n")
    said, fits = judged_size(asked.folder, checkout_bytes(), parts)
    print(said)
    return int(not fits)


def judged_size(folder: Path, checkout: int, parts: Path, most: int = MOST_BYTES) -> tuple[str, bool]:
    """Returns the size of ``folder`` beside that of a checkout of ``checkout`` bytes, in words, and whether both
    are at most ``most`` bytes together. If they aren't, the words name the largest wheels of ``parts``.
    """
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    both = f"{sum(sizes.values()) / (1 << 20):.1f} MiB in {folder}, {checkout / (1 << 20):.1f} in the checkout"
    if (total := sum(sizes.values()) + checkout) <= most:
        return f"{both}; {most >> 20} at most", True
    wheels = sorted(parts.rglob("*.whl"), key=lambda path: -path.stat().st_size)[:8]
    names = ", ".join(
        f"{path.name.split('-')[0].replace('_', '-')} {path.stat().st_size / (1 << 20):.1f}" for path in wheels
    )
    return (
        f"{both}: {(total - most) / (1 << 20):.1f} too many; name with --there what the machine has of {names}",
        False,
    )


def checkout_bytes() -> int:
    """Returns the bytes of this checkout's files."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=KERNELS.parents[1], capture_output=True, check=True
    ).stdout
    paths = [KERNELS.parents[1] / name for name in names.decode().split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
