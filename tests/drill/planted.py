"""Hunts the bugs of ``bugs`` with `baton drill`: each is planted in a copy of the package, until a seed finds it.

``find`` runs seeds on a copy of the package with one bug in it, until an invariant breaks.

    python -m tests.drill.planted [NAME]      every bug (or one): whether it was found, and the CPU seconds it took
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import baton
from tests.drill.bugs import BUGS, Bug

PACKAGE = Path(baton.__file__).parent
RUN = """
import sys, time
from baton.drill.run import play
from baton.drill.scenario import FAULTS, Size, draw
kinds = tuple(sys.argv[2].split(",")) if sys.argv[2] else FAULTS
began = time.process_time()
for seed in range(int(sys.argv[1])):
    verdict = play(draw(seed, Size(kinds=kinds)), first_only=True)
    if not verdict.held:
        print(seed, round(time.process_time() - began, 1), verdict.violations[0])
        sys.exit(1)
"""


class Finding(NamedTuple):
    """What a hunt came to. ``seconds`` is CPU time; ``seed`` is None where nothing was found."""

    seed: int | None
    seconds: float
    said: str


def find(bug: Bug, seeds: int, seconds: float = 600.0) -> Finding:
    """Hunts ``bug`` with up to ``seeds`` seeds. Raises AssertionError where the source no longer has its text."""
    with tempfile.TemporaryDirectory(prefix="planted-") as root:
        copy = Path(root, "baton")
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in bug.edits:
            source = (copy / file).read_text()
            assert source.count(old) == 1, f"{bug.name}: {file} has its text {source.count(old)} times"
            (copy / file).write_text(source.replace(old, new))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(seeds), ",".join(bug.faults)],
            env={**os.environ, "PYTHONPATH": root}, cwd=root, capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode == 1 and done.stdout:
        seed, _, said = done.stdout.partition(" ")
        return Finding(int(seed), took, said.strip())
    return Finding(None, took, done.stderr[-500:])


def main() -> None:
    """Prints what became of each bug."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for bug in BUGS:
        if wanted in bug.name:
            finding = find(bug, 100)
            where = f"seed {finding.seed}" if finding.seed is not None else "NOT FOUND"
            print(f"{where:>9} {finding.seconds:6.1f} s  {bug.name}: {finding.said[:150]}", flush=True)


if __name__ == "__main__":
    main()
