"""Checks how many loads of the machine code are under way together. Torch-free.

Knows nothing of latencies. ``in_flight.json``: op -> kernel (a glob over the short name) -> ``loads``, a regular
expression of their mnemonics, and how many at ``least`` are on their way ``before`` each instruction of that
mnemonic, or at some place where it isn't given. A load is on its way until an instruction names one of its
registers: that one waits for it, and for those that were issued before it.

    python -m baton.kernels.cuda.machine_code.in_flight          checks; exit status 1 if there are fewer
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from baton.kernels.cuda import build
from baton.kernels.cuda.machine_code.disassembly import Instruction, instructions
from baton.kernels.cuda.names import named

RECORD = Path(__file__).parents[1] / "records" / "in_flight.json"
_REGISTER = re.compile(r"\bR(\d+)\b")
_BITS = re.compile(r"\.(64|128)\b")


class WantedLoads(TypedDict, total=False):
    """Says how many loads of a kernel are to be under way together, and where."""

    loads: str
    least: int
    before: str


def under_way(code: Sequence[Instruction], loads: str, before: str = "") -> Iterator[int]:
    """Yields how many of the ``loads`` are on their way at each instruction like ``before``, else behind each
    load.
    """
    waiting: list[range] = []  # registers of each, oldest first
    for each in code:
        is_load = re.fullmatch(loads, each.mnemonic) is not None
        read = each.operands.partition(",")[2] if is_load else each.operands
        named = {int(number) for number in _REGISTER.findall(read)}
        for at in reversed(range(len(waiting))):
            if any(number in waiting[at] for number in named):
                del waiting[: at + 1]
                break
        if before and re.fullmatch(before, each.mnemonic):
            yield len(waiting)
        if is_load:
            bits = _BITS.search(each.mnemonic)
            first = int(_REGISTER.findall(each.operands)[0])
            waiting.append(range(first, first + (int(bits[1]) // 32 if bits else 1)))
            if not before:
                yield len(waiting)


def lacking(wanted: Mapping[str, WantedLoads], kernels: Mapping[str, Sequence[Instruction]]) -> list[str]:
    """Returns a message for each kernel that has fewer loads under way than are ``wanted``, and for each pattern
    without a kernel.
    """
    found, said = named(wanted, kernels)
    for name, need in found:
        before = need.get("before", "")
        counts = list(under_way(kernels[name], need["loads"], before))
        together = min(counts, default=0) if before else max(counts, default=0)
        if together < need["least"]:
            said.append(f"{name} has {together} loads under way together, and {need['least']} are meant")
    return said


def check() -> list[str]:
    """Returns a message for each violation of ``in_flight.json``. Raises BuildError."""
    wanted, said = json.loads(RECORD.read_text()), []
    for made in build.cubins(wanted):
        said += [f"{made.op}: {line}" for line in lacking(wanted[made.op], instructions(made.cubin))]
    return said


def main() -> int:
    """Checks all ops; returns exit status 1 if a check fails, else 0."""
    return build.exit_status(check, "loads under way")


if __name__ == "__main__":
    sys.exit(main())
