"""Rewrites the assertions of test modules before a parallel run collects them, on every core.

Without it the one process that collects does so in a fresh clone, while the other cores wait. pytest offers no
other way to fill its cache than to import the modules. Knows nothing of tests.
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


def rewrite_all(config: pytest.Config, folder: Path) -> None:
    """Writes the rewritten modules of ``folder`` to pytest's cache, if they aren't there, by a process per core."""
    if sys.dont_write_bytecode or rewrite.assertstate_key not in config.stash:
        return
    count = len(os.sched_getaffinity(0))
    helpers = []
    for number in range(1, count):
        if (pid := os.fork()) == 0:
            _rewrite_share(config, folder, number, count)
            os._exit(0)
        helpers.append(pid)
    _rewrite_share(config, folder, 0, count)
    for pid in helpers:
        os.waitpid(pid, 0)


def _rewrite_share(config: pytest.Config, folder: Path, number: int, count: int) -> None:
    for path in itertools.islice(_modules(folder), number, None, count):
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
