"""Runs all checks of the CUDA kernels that need no GPU (``make cuda-check``). Torch-free.

Knows nothing of how each gate works. nvcc compiles every ``cuda.cu`` for sm_90a, the resources that ptxas reports
are compared with the ledger, the machine code with the intended instructions, and the blocks that fit on a
multiprocessor with those that the sources count on. Then the suites run on the SIMT shim, under several schedules,
with planted bugs. If nvcc or cuobjdump is missing, its gate is left out with a message; --strict makes that a
failure. --write updates the ledger first, and ran.json and docs/cuda.md if the suites passed.

    python -m baton.kernels.cuda.check [--strict] [--write] [pytest's arguments]
    python -m baton.kernels.cuda.check --write --ops moe,step -k "moe or step or rank"   those two alone
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from baton.kernels.abi.build import BuildError
from baton.kernels.cuda import build, ledger, table
from baton.kernels.cuda.library import LAUNCHES_ENV
from baton.kernels.cuda.machine_code import disassembly, in_flight, occupancy

SCHEDULES = "8"
SUITES = "tests/kernels/cuda"
SEEDS_ENV = "BATON_CUDA_SEEDS"
LAUNCHED_ENV = "BATON_CUDA_LAUNCHED"  # the file to which the tests' process writes what it launched


def compiled() -> list[str]:
    """Compiles every op for sm_90a and returns []. Raises BuildError if that fails."""
    build.cubins()
    return []


def costs() -> list[str]:
    """Returns a message for each resource above the ledger, and for each warp-group product that ptxas
    serialized.
    """
    waits = [f"{made.op}: {line}" for made in build.cubins() for line in ledger.serialized(made.ptxas)]
    return waits + ledger.differences(json.loads(ledger.LEDGER.read_text()), ledger.current())


def page() -> list[str]:
    """Returns a message if docs/cuda.md doesn't match the sources, else []."""
    return (
        [] if table.current() else ["docs/cuda.md is not of these sources; run: python -m baton.kernels.cuda.table"]
    )


GATES: tuple[tuple[str, Callable[[], object], Callable[[], list[str]]], ...] = (
    ("nvcc compiles every op for sm_90a", build.nvcc, compiled),
    ("registers, shared memory and spills are within the ledger", build.nvcc, costs),
    ("the machine code has the instructions meant", disassembly.cuobjdump, disassembly.check),
    ("as many blocks fit as are counted on", disassembly.cuobjdump, occupancy.check),
    ("as many loads are under way together as are meant", disassembly.cuobjdump, in_flight.check),
    ("docs/cuda.md is current", build.nvcc, page),
)


def gate(name: str, needs: Callable[[], object], check: Callable[[], list[str]]) -> bool | None:
    """Runs one check and prints the result; returns whether it passed, None if a tool that it ``needs`` is
    missing.
    """
    try:
        build.nvcc()
        needs()
    except BuildError as error:
        print(f"left out: {name}: {error}")
        return None
    begin = time.monotonic()
    try:
        said = check()
    except BuildError as error:
        said = [str(error)]
    print(f"{'FAILED' if said else 'ok'}: {name} ({time.monotonic() - begin:.1f} s)")
    for line in said:
        print(f"    {line}")
    return not said


def suites(arguments: list[str]) -> tuple[bool, list[str]]:
    """Runs the tests on the shim, under several schedules, with pytest's ``arguments``; returns whether they
    passed, and the kernels that they launched, each as "op kernel".
    """
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "launched"
        environment = {SEEDS_ENV: SCHEDULES, **os.environ, LAUNCHES_ENV: "1", LAUNCHED_ENV: str(told)}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", SUITES, *arguments]
        passed = subprocess.run(command, env=environment, check=False).returncode == 0
        return passed, sorted({*told.read_text().splitlines()}) if told.exists() else []


def main() -> int:
    """Runs every check; returns exit status 1 if one fails, else 0."""
    asked, of_pytest = _parser().parse_known_args()
    ran, launched = suites(of_pytest)
    if asked.write and ran:
        ledger.LEDGER.write_text(json.dumps(ledger.current(), indent=1, sort_keys=True) + "\n")
        table.mark_run(launched, asked.ops.split(",") if asked.ops else ())
        table.PAGE.write_text(table.text())
    found = [gate(*each) for each in GATES]
    fine = ran and all(result is not False for result in found) and not (asked.strict and None in found)
    return 0 if fine else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m baton.kernels.cuda.check",
        description="Runs all checks of the CUDA kernels that need no GPU. What isn't named here goes to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--strict", action="store_true", help="fail where nvcc or cuobjdump is missing")
    parser.add_argument(
        "--ops", default="", help="with --write: these alone, by comma, whose tests pytest's arguments choose"
    )
    parser.add_argument("--write", action="store_true", help="renew the records that describe these sources")
    return parser


if __name__ == "__main__":
    sys.exit(main())
