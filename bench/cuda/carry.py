"""Makes the folder that bench/on_card.py takes along to a GPU: wheels for its Python, libraries, the commit.

    python -m bench.cuda.carry FOLDER [--python 3.12] [--there NAME,NAME] [--no-libraries]

Knows nothing of the machine there, but that it has torch with CUDA. Wheels are of the versions that are installed
here, for the other Python; what comes with torch (numpy, its own needs) stays there. The CUDA library is compiled
where nvcc is here, the CPU's for every instruction set. Needs a package index.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from baton.kernels.abi import build as cpu
from baton.kernels.abi.build import KERNELS, BuildError
from baton.kernels.cuda.build import keep_in
from bench.cuda.rows import commit

PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64")
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


def libraries(folder: Path) -> None:
    """Builds the library for a GPU and those for every CPU; says what can't be built here."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        print(f"for a GPU: {keep_in(folder).name}")
    except BuildError as error:
        print(f"left out: the library for a GPU: {str(error).splitlines()[0]}", file=sys.stderr)
    for isa, flags in cpu.ISA_FLAGS.items():
        name = cpu.prebuilt_name(isa, (*cpu.FLAGS, *flags))
        print(f"for {isa}: {Path(shutil.copy(cpu.built(isa), folder / name)).name}")


def main() -> int:
    """Makes the folder; returns 1 where it is too large to be carried."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version there (3.12)")
    parser.add_argument("--there", default="", help="packages that the machine has in versions that will do")
    parser.add_argument("--no-libraries", action="store_true", help="wheels alone")
    asked = parser.parse_args()
    download(asked.folder / "wheels", asked.python, pins(there=asked.there.lower().split(",")))
    if not asked.no_libraries:
        libraries(asked.folder / "kernels")
    (asked.folder / "commit").write_text(commit() + "\n")
    said, fits = judged_size(asked.folder, checkout_bytes())
    print(said)
    return int(not fits)


def judged_size(folder: Path, checkout: int, most: int = MOST_BYTES) -> tuple[str, bool]:
    """Returns the size of ``folder`` beside that of a checkout of ``checkout`` bytes, in words, and whether both
    are at most ``most`` bytes together. If they aren't, the words name the largest wheels.
    """
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    both = f"{sum(sizes.values()) / (1 << 20):.1f} MiB in {folder}, {checkout / (1 << 20):.1f} in the checkout"
    if (total := sum(sizes.values()) + checkout) <= most:
        return f"{both}; {most >> 20} at most", True
    wheels = sorted((path for path in sizes if path.suffix == ".whl"), key=lambda path: -sizes[path])[:8]
    names = ", ".join(
        f"{path.name.split('-')[0].replace('_', '-')} {sizes[path] / (1 << 20):.1f}" for path in wheels
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
