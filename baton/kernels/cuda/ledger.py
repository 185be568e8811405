"""Compares each kernel's resources with ``ledger.json``: more registers, shared memory or spills are failures.

Knows nothing of the kernels' speed. The numbers are one compiler's: with another release of nvcc only spills are
compared. Torch-free.

    python -m baton.kernels.cuda.ledger            compares; exit status 1 if a kernel grew or is not in it
    python -m baton.kernels.cuda.ledger --write    writes the ledger anew
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TypedDict

from baton.kernels.abi.compiler import run_tool
from baton.kernels.cuda import build
from baton.kernels.cuda.names import short

LEDGER = Path(__file__).with_name("records") / "ledger.json"
COSTS = ("registers", "shared", "spills")
Cost = dict[str, int]


class Ledger(TypedDict):
    """The costs of each kernel, by op, and the hash of the sources of each op that was compiled."""

    arch: str
    nvcc: str
    kernels: dict[str, dict[str, Cost]]
    sources: dict[str, str]


_WHAT = re.compile(
    r"Compiling entry function '(?P<entry>\S+)'|Function properties for (?P<of>\S+)"
    r"|(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"|Used (?P<registers>\d+) registers(?P<rest>.*)"
)


def costs(ptxas: str) -> dict[str, Cost]:
    """Returns, by kernel, the costs in the output of ``ptxas -v``: registers per thread, bytes of static shared
    memory, and bytes spilled.
    """
    found: dict[str, Cost] = {}
    entry = of = ""
    for line in _WHAT.finditer(ptxas):
        if line["entry"]:
            entry = of = line["entry"]
            found[short(entry)] = dict.fromkeys(COSTS, 0)
        elif line["of"]:
            of = line["of"]
        elif line["stores"] and of == entry:
            found[short(entry)]["spills"] = int(line["stores"]) + int(line["loads"])
        elif line["registers"]:
            shared = re.search(r"(\d+) bytes smem", line["rest"])
            found[short(entry)] |= {"registers": int(line["registers"]), "shared": int(shared[1]) if shared else 0}
    return found


def serialized(ptxas: str) -> list[str]:
    """Returns ptxas' warnings on warp-group products (wgmma) that it serialized."""
    return [" ".join(line.split()) for line in ptxas.splitlines() if "serialized" in line]


def release() -> str:
    """Returns the release of nvcc, such as "13.0". Raises BuildError."""
    found = re.search(r"release (\d+\.\d+)", run_tool([build.nvcc(), "--version"]))
    return found[1] if found else "unknown"


def current() -> Ledger:
    """Returns the ledger of the present sources, which it compiles. Raises BuildError."""
    kernels = {made.op: costs(made.ptxas) for made in build.cubins()}
    sources = {op: build.source_key(op) for op in kernels}
    return {"arch": build.ARCH, "nvcc": release(), "kernels": kernels, "sources": sources}


def differences(old: Ledger, new: Ledger) -> list[str]:
    """Returns a message for each kernel that costs more in ``new`` than in ``old``, or that is in only one of
    them.
    """
    same = old["nvcc"] == new["nvcc"]
    said = []
    for op in sorted({*old["kernels"], *new["kernels"]}):
        before, now = old["kernels"].get(op, {}), new["kernels"].get(op, {})
        said += [f"{op}: {name} is not in the ledger" for name in now if name not in before]
        said += [f"{op}: {name} is in the ledger and no longer in the source" for name in before if name not in now]
        for name in now.keys() & before.keys():
            for cost in COSTS if same else ("spills",):
                if now[name][cost] > before[name][cost]:
                    said.append(
                        f"{op}: {name} takes {now[name][cost]} {cost}, the ledger allows {before[name][cost]}"
                    )
    return said


def compared() -> list[str]:
    """Returns a message for each way in which the sources differ from the ledger; rewrites it with --write. Raises
    BuildError.
    """
    new = current()
    if "--write" in sys.argv[1:]:
        LEDGER.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
        print(f"{LEDGER.name}: {sum(map(len, new['kernels'].values()))} kernels")
        return []
    old = json.loads(LEDGER.read_text())
    if old["nvcc"] != new["nvcc"]:
        print(f"the ledger is of nvcc {old['nvcc']}, this is {new['nvcc']}: only spills are compared")
    said = differences(old, new)
    return [*said, "run: python -m baton.kernels.cuda.ledger --write, if that is meant"] if said else []


def main() -> int:
    """Compares the ledger, or with --write rewrites it; returns exit status 1 if they differ, else 0."""
    return build.exit_status(compared, "the ledger")


if __name__ == "__main__":
    sys.exit(main())
