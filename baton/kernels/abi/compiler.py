"""Finds and runs the C++ compiler, and names what it makes by content. Torch-free.

Knows nothing of kernels, ISAs or GPUs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILER_ENV = "BATON_CXX"  # the variable that names a compiler, because the first one on PATH may be too old


class BuildError(Exception):
    """Raised if a library can't be built; the message is that no compiler was found, or the compiler's own."""


def cache_key(*parts: bytes) -> str:
    """Returns a hash, 24 hex digits, of ``parts`` and of where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def compiler() -> str:
    """Returns the path of the C++ compiler: $BATON_CXX, or g++, c++ or clang++ on PATH. Raises BuildError if there
    is none.
    """
    named = os.environ.get(COMPILER_ENV)
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not found:
        raise BuildError(f"no C++ compiler ({named or 'g++, c++, clang++'}) on PATH")
    return found


def version_of(compiler: str) -> str:
    """Returns the first line that ``compiler`` says of its version. Raises BuildError."""
    return run_tool([compiler, "--version"]).splitlines()[0]


def made(path: Path, command: list[str]) -> Path:
    """Returns ``path``, made if missing by running ``command`` with a temporary file as its -o, then renaming
    that. Raises BuildError.
    """
    if path.exists():
        return path
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        run_tool([*command, "-o", temporary])
        Path(temporary).chmod(0o755)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def run_tool(command: list[str]) -> str:
    """Returns what ``command`` writes to stdout. Raises BuildError, with the end of its stderr, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout
