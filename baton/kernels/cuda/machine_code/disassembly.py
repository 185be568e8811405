"""Checks by cuobjdump that the machine code has the instructions that the sources intend. Torch-free.

Knows nothing of the kernels' speed. ``expect.json``: op -> kernel (a glob over the short name) -> regular
expressions, each of which must match a mnemonic of every such kernel; one with "!" in front must match none.

    python -m baton.kernels.cuda.machine_code.disassembly       checks; exit status 1 if an instruction is missing
    python -m baton.kernels.cuda.machine_code.disassembly OP    lists the op's mnemonics, for writing its lines
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baton.kernels.abi.build import BuildError
from baton.kernels.abi.compiler import run_tool
from baton.kernels.cuda import build
from baton.kernels.cuda.names import named, short

EXPECT = Path(__file__).parents[1] / "records" / "expect.json"
_LINE = re.compile(
    r"Function : (?P<name>\S+)"
    r"|/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<mnemonic>[A-Z][\w.]+)(?P<operands>[^;\n]*);"
)


class Instruction(NamedTuple):
    """One line of machine code: its mnemonic with modifiers, and what stands behind it."""

    mnemonic: str
    operands: str


def cuobjdump() -> str:
    """Returns the path of cuobjdump: on PATH, or from the package nvidia-cuda-cuobjdump. Raises BuildError if
    missing.
    """
    packaged = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "cuobjdump")
    found = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump") or shutil.which(packaged)
    if not found:
        raise BuildError("no cuobjdump on PATH; pip install nvidia-cuda-cuobjdump")
    return found


def instructions(cubin: Path) -> dict[str, list[Instruction]]:
    """Returns the instructions of each kernel, in order. Raises BuildError."""
    return parsed(run_tool([cuobjdump(), "-sass", str(cubin)]))


def parsed(text: str) -> dict[str, list[Instruction]]:
    """Returns, by kernel, the instructions in what ``cuobjdump -sass`` printed."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for line in _LINE.finditer(text):
        if line["name"]:
            name = short(line["name"])
            found[name] = []
        else:
            found[name].append(Instruction(line["mnemonic"], line["operands"]))
    return found


def mnemonics(cubin: Path) -> dict[str, Counter[str]]:
    """Returns, by kernel, the number of instructions by mnemonic with modifiers. Raises BuildError."""
    return {name: Counter(each.mnemonic for each in code) for name, code in instructions(cubin).items()}


def missing(expect: Mapping[str, list[str]], kernels: Mapping[str, Counter[str]]) -> list[str]:
    """Returns a message for each condition of ``expect`` that one op's ``kernels`` don't meet."""
    found, said = named(expect, kernels)
    for name, wanted in found:
        for regex in wanted:
            has = any(re.fullmatch(regex.removeprefix("!"), mnemonic) for mnemonic in kernels[name])
            if has == regex.startswith("!"):
                said.append(f"{name} has {'an' if has else 'no'} instruction like {regex.removeprefix('!')}")
    return said


def check() -> list[str]:
    """Returns a message for each violation of ``expect.json``, including ops that it doesn't name. Raises
    BuildError.
    """
    expect = json.loads(EXPECT.read_text())
    said = [f"{op}: it has a line in {EXPECT.name}, and no cuda.cu" for op in expect if op not in build.ops()]
    for made in build.cubins():
        if made.op not in expect:
            said.append(f"{made.op}: {EXPECT.name} has no line for it")
            continue
        said += [f"{made.op}: {line}" for line in missing(expect[made.op], mnemonics(made.cubin))]
    return said


def listed(ops: Sequence[str]) -> list[str]:
    """Prints the instructions of ``ops``' kernels, which are nothing to complain of. Raises BuildError."""
    for made in build.cubins(ops):
        for name, counts in mnemonics(made.cubin).items():
            print(name, *(f"{mnemonic}:{count}" for mnemonic, count in counts.most_common()))
    return []


def main() -> int:
    """Checks all ops, or lists the instructions of the ops named; returns exit status 1 if a check fails, else
    0.
    """
    ops = sys.argv[1:]
    return build.exit_status((lambda: listed(ops)) if ops else check, "the disassembly")


if __name__ == "__main__":
    sys.exit(main())
