"""Hunts the bugs of ``bugs`` with `baton drill`: each is planted in a copy of the package, until a seed finds it.

A run ends at its first violation. A seed counts as a finding only if it holds without the bug.

    python -m tests.drill.planted [NAME]      every bug (or one): whether it was found, and the CPU seconds it took
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

import baton
from tests.drill.bugs import BUGS, Bug

PACKAGE = Path(baton.__file__).parent
MOST_SECONDS = 600.0  # CPU seconds that a hunt takes at most
RUN = """
import sys, time
import msgspec
from baton.drill.run import play
from baton.drill.draw import draw
from baton.drill.scenario import Size
limit, size = float(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Size)
skipped = set(map(int, sys.argv[3].split(","))) if sys.argv[3] else ()
seed = 0
while time.process_time() < limit:
    if seed not in skipped:
        verdict = play(draw(seed, size), first_only=True)
        if not verdict.held:
            print(seed, round(time.process_time(), 1), verdict.violations[0])
            sys.exit(1)
    seed += 1
print(seed, round(time.process_time(), 1), "every seed held")
"""
CHECK = """
import sys
import msgspec
from baton.drill.run import play
from baton.drill.draw import draw
from baton.drill.scenario import Size
size = msgspec.json.decode(sys.argv[2], type=Size)
sys.exit(0 if play(draw(int(sys.argv[1]), size), first_only=True).held else 1)
"""


class Finding(NamedTuple):
    """Holds the outcome of a hunt: ``seconds`` is CPU time, ``seed`` None if nothing was found."""

    seed: int | None
    seconds: float
    said: str


def find(bug: Bug, seconds: float = MOST_SECONDS) -> Finding:
    """Hunts ``bug`` for so many CPU seconds. Raises AssertionError where the source no longer has its text."""
    with tempfile.TemporaryDirectory(prefix="planted-") as root:
        plant(bug, Path(root))
        drawn = msgspec.json.encode(bug.hunted).decode()
        skipped: list[str] = []  # seeds that fail without the bug as well, and so find nothing
        while True:
            done = _run(RUN, root, str(seconds), drawn, ",".join(skipped))
            seed, took, said = done.stdout.strip().split(" ", 2) if done.stdout else ("", "0", done.stderr[-500:])
            if done.returncode != 1 or not seed:
                return Finding(None, float(took), said)
            if _run(CHECK, str(PACKAGE.parent), seed, drawn).returncode == 0:
                return Finding(int(seed), float(took), said)
            skipped.append(seed)


def plant(bug: Bug, root: Path) -> None:
    """Copies the package to ``root`` with the bug in it."""
    copy = root / "baton"
    shutil.copytree(PACKAGE, copy)  # with its bytecode, which holds for all files but those that are edited
    for file, old, new in bug.edits:
        source = (copy / file).read_text()
        assert source.count(old) == 1, f"{bug.name}: {file} has its text {source.count(old)} times"
        (copy / file).write_text(source.replace(old, new))


def _run(code: str, root: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": root}, cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip


def main() -> None:
    """Prints what became of each bug, and the median of the CPU seconds."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    took = []
    for bug in BUGS:
        if wanted in bug.name:
            finding = find(bug)
            where = f"seed {finding.seed}" if finding.seed is not None else "NOT FOUND"
            took += [finding.seconds] if finding.seed is not None else []
            print(f"{where:>9} {finding.seconds:6.1f} s  {bug.name}: {finding.said[:150]}", flush=True)
    if took:
        print(f"{len(took)} found, median {statistics.median(took):.1f} CPU s, at most {max(took):.1f}")


if __name__ == "__main__":
    main()
