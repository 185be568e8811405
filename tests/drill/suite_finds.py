"""Counts which of the planted bugs the ordinary suite finds, without the simulation's own tests.

Each bug is planted in a copy of the tree. The tests that mirror the changed file's folder run first, then those of
the control plane, then whole clusters, until one fails. A failure counts only where that test passes without the
bug.

    python -m tests.drill.suite_finds [NAME]      every bug (or those whose name has NAME in it)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.drill.bugs import BUGS, Bug
from tests.drill.planted import PACKAGE, plant

TREE = PACKAGE.parent
CONTROL_PLANE = (
    "router",
    "decode_worker",
    "prefill_worker",
    "worker",
    "kv",
    "cluster",
    "controller",
    "process",
    "protos",
)
WHOLE_CLUSTERS = ("e2e", "router_host", "launch")
LIMIT_S = 1200  # seconds of one part of the suite
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\S+)?)", re.MULTILINE)


def finder(bug: Bug) -> str:
    """Returns the first test of the ordinary suite that fails with ``bug`` and not without; "" if there is none."""
    with tempfile.TemporaryDirectory(prefix="planted-") as root:
        plant(bug, Path(root))
        for name in ("tests", "bench", "docs", "deploy", "models"):
            if (TREE / name).exists():
                shutil.copytree(TREE / name, Path(root) / name)
        for name in ("pyproject.toml", "README.md", "Makefile"):
            shutil.copy(TREE / name, Path(root) / name)
        for part in _parts(bug):
            for test in FAILED.findall(_pytest(root, *part, "-x", "-n", "2", "--dist", "loadfile")):
                if not FAILED.search(_pytest(str(TREE), test)):
                    return str(test)
    return ""


def _parts(bug: Bug) -> Iterator[list[str]]:
    """Yields the folders of tests, the nearest to the bug's files first."""
    near = {Path("tests") / Path(file).parent for file, _, _ in bug.edits}
    yield sorted(str(folder) for folder in near if (TREE / folder).is_dir())
    yield [f"tests/{name}" for name in CONTROL_PLANE if (TREE / "tests" / name).is_dir()]
    yield [f"tests/{name}" for name in WHOLE_CLUSTERS if (TREE / "tests" / name).is_dir()]


def _pytest(root: str, *args: str) -> str:
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=no", *args]
    env = {**os.environ, "PYTHONPATH": root}
    try:
        done = subprocess.run(
            command, env=env, cwd=root, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode()
    return done.stdout


def main() -> None:
    """Prints for each bug the test that finds it, and how many are found."""
    wanted = [bug for bug in BUGS if (sys.argv[1] if len(sys.argv) > 1 else "") in bug.name]
    found = 0
    for bug in wanted:
        test = finder(bug)
        found += bool(test)
        print(f"{'found' if test else 'NOT FOUND':>9}  {bug.name}: {test}", flush=True)
    print(f"the ordinary suite finds {found} of {len(wanted)}")


if __name__ == "__main__":
    main()
