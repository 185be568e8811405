"""Rewrites the assertions of test modules once for all processes of a parallel run, each its share of the files.

Without it each process of a run in a fresh clone rewrites every module, because all of them collect all tests.
Knows nothing of tests. pytest offers no other way to fill its cache than to import the modules.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

PATTERNS = "conftest.py", "test_*.py"


def rewrite_share(config: pytest.Config, folder: Path) -> None:
    """Writes the rewritten modules of this process's share of ``folder`` to pytest's cache, if they aren't there;
    does nothing in a run of one process.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or rewrite.assertstate_key not in config.stash:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in itertools.islice(_modules(folder), number % count, None, count):
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # pytest tells, if it collects that module
            rewrite_module(config, path)


def rewrite_module(config: pytest.Config, path: Path) -> Path:
    """Writes the rewritten module at ``path`` to pytest's cache, if its source has changed; returns its file."""
    folder = rewrite.get_cache_dir(path)
    cached = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, cached) is None:
        source_hash, code = rewrite._rewrite_test(path, config)
        os.makedirs(folder, exist_ok=True)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)
    return cached


def _modules(folder: Path) -> Iterator[Path]:
    """Yields the modules that pytest rewrites, in the order in which it collects them."""
    for path, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if any(Path(name).match(pattern) for pattern in PATTERNS):
                yield Path(path, name)
