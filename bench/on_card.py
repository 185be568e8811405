"""Starts bench/gpu.py on a machine that has a GPU, torch with CUDA and nothing of ours: another Python, no network.

    python -m bench.cuda.carry FOLDER            on the machine at hand: wheels and libraries, made ahead
    python3 bench/on_card.py FOLDER [arguments of bench/gpu.py]          on the GPU's

Knows nothing of what is run, and imports nothing but Python's own library. FOLDER's wheels are put beside what that
Python has (which keeps its own torch and numpy); its libraries are found by $BATON_KERNELS_DIR; its commit is told
by $BATON_COMMIT unless that is set already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(tempfile.gettempdir()) / "baton-site"  # kept from call to call on one machine
FILES = SITE.with_name("baton-files")  # as SITE
PACKED = "packed.tar.xz"


def unpacked(folder: Path, to: Path) -> Path:
    """Returns the folder with wheels and libraries: ``folder``, or ``to`` where ``folder`` has them in one archive,
    which is unpacked there unless an earlier call did so.
    """
    packed = folder / PACKED
    if not packed.exists():
        return folder
    done, stamp = to / ".packed", f"{packed.resolve()} {packed.stat().st_size} {packed.stat().st_mtime_ns}"
    if not done.exists() or done.read_text() != stamp:
        shutil.rmtree(to, ignore_errors=True)
        with tarfile.open(packed, "r:xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
            archive.extractall(to)
        done.write_text(stamp)
    return to


def installed(folder: Path, site: Path) -> float:
    """Puts the wheels of ``folder`` into ``site``, unless they are there; returns the seconds that it took."""
    wheels, began = sorted(map(str, folder.glob("wheels/*.whl"))), time.monotonic()
    done = site / ".wheels"
    if wheels and (not done.exists() or done.read_text() != "\n".join(wheels)):
        flags = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", str(site), *wheels], check=True)
        done.write_text("\n".join(wheels))
    return time.monotonic() - began


def environment(folder: Path, site: Path, files: Path) -> dict[str, str]:
    """Returns what bench/gpu.py runs with: the commit of ``folder``, the libraries among ``files``."""
    commit = folder / "commit"
    told = {"BATON_COMMIT": commit.read_text().strip()} if commit.exists() else {}
    return {
        **told,
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(site))),
        "BATON_KERNELS_DIR": str((files / "kernels").resolve()),
        "PYTHONMALLOC": "malloc",  # kernels/cuda/on_gpu.py registers the heap
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def main(argv: list[str]) -> int:
    """Installs, then runs bench/gpu.py; returns its status."""
    if not argv or not Path(argv[0]).is_dir():
        print("usage: python3 bench/on_card.py FOLDER [arguments of bench/gpu.py]", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    try:
        files = unpacked(folder, FILES)
    except tarfile.CompressionError as error:
        print(f"{folder / PACKED}: {error}; make the folder with --plain", file=sys.stderr)
        return 2
    print(f"wheels beside Python {sys.version.split()[0]}: {installed(files, SITE):.0f} s", flush=True)
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), *argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment(folder, SITE, files), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
