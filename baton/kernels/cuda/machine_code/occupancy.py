"""Checks that as many blocks fit on a multiprocessor as the sources count on. Torch-free.

Knows nothing of speed. ``occupancy.json``: op -> kernel (a glob over the short name) -> the ``blocks`` that are to
be resident, and the ``shared`` bytes of dynamic memory that each is launched with at most (``bytes``: the constant
of the sources that says so). Registers and static shared memory are ptxas', threads the machine code's.

    python -m baton.kernels.cuda.machine_code.occupancy          checks; exit status 1 if fewer blocks fit
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from baton.kernels.abi.compiler import run_tool
from baton.kernels.cuda import build, ledger
from baton.kernels.cuda.ledger import Cost
from baton.kernels.cuda.machine_code.disassembly import cuobjdump
from baton.kernels.cuda.names import named, short

RECORD = Path(__file__).parents[1] / "records" / "occupancy.json"
# Of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, technical specifications).
REGISTERS, SHARED, THREADS, BLOCKS = 65_536, 228 << 10, 2048, 32
OF_BLOCK = 1024  # bytes of shared memory that the system takes of each block
UNIT = 8  # registers of a thread are given in so many
_SECTION = re.compile(
    r"^\.nv\.info\.(?P<kernel>\S+)$|EIATTR_MAX_THREADS\s+Format:\s+\S+\s+Value:\s+(?P<threads>[^\n]+)", re.M
)


class Wanted(TypedDict, total=False):
    """Says what the sources count on for a kernel."""

    blocks: int
    shared: int
    bytes: str


def fitting(cost: Cost, threads: int, shared: int) -> int:
    """Returns how many blocks of ``threads`` threads and ``shared`` bytes of dynamic memory fit."""
    warps = -(-threads // 32)
    registers = -(-cost["registers"] // UNIT) * UNIT * 32 * warps
    memory = cost["shared"] + shared + OF_BLOCK
    return min(REGISTERS // registers, SHARED // memory, THREADS // (32 * warps), BLOCKS)


def threads_of(cubin: Path) -> dict[str, int]:
    """Returns, by kernel, the threads of a block that it was compiled for. Raises BuildError."""
    found: dict[str, int] = {}
    name = ""
    for line in _SECTION.finditer(run_tool([cuobjdump(), "-elf", str(cubin)])):
        if line["kernel"]:
            name = short(line["kernel"])
        else:
            x, y, z = (int(number, 16) for number in line["threads"].split())
            found[name] = x * y * z
    return found


def lacking(wanted: Mapping[str, Wanted], costs: Mapping[str, Cost], threads: Mapping[str, int]) -> list[str]:
    """Returns a message for each kernel of which fewer blocks fit than are ``wanted``, and for each pattern without
    a kernel.
    """
    found, said = named(wanted, costs)
    for name, need in found:
        fit = fitting(costs[name], threads[name], need["shared"])
        if fit < need["blocks"]:
            said.append(f"{fit} blocks of {name} fit on a multiprocessor, and {need['blocks']} are counted on")
    return said


def check() -> list[str]:
    """Returns a message for each violation of ``occupancy.json``. Raises BuildError."""
    wanted, said = json.loads(RECORD.read_text()), []
    for made in build.cubins(wanted):
        costs = ledger.costs(made.ptxas)
        said += [f"{made.op}: {line}" for line in lacking(wanted[made.op], costs, threads_of(made.cubin))]
    return said


def main() -> int:
    """Checks all ops; returns exit status 1 if a check fails, else 0."""
    return build.exit_status(check, "occupancy")


if __name__ == "__main__":
    sys.exit(main())
