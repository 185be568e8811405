"""The code that g++ makes for AMX: products by tiles where they are meant, nothing else in their loops."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.kernels.abi import build

pytestmark = pytest.mark.thorough
_LABEL, _JUMP = re.compile(r"^(\.L\d+):"), re.compile(r"^\s+j\w+\s+(\.L\d+)\b")


class Loop(NamedTuple):
    """Counts an innermost loop's instructions on tiles."""

    products: dict[str, int]
    loads: int
    others: tuple[str, ...]  # other instructions on tiles, and whatever goes to the stack or comes from it


def assembly(op: str, folder: Path) -> list[str]:
    """Compiles an op's cpu.cpp for AMX; returns the assembly's lines."""
    compiler, out = build.compiler(), folder / f"{op}.s"
    if "clang" in compiler:
        pytest.skip("the gate reads g++'s assembly")
    source = build.KERNELS / op / "cpu.cpp"
    command = [compiler, *build.FLAGS, *build.ISA_FLAGS["amx"], "-S", str(source), "-o", str(out)]
    subprocess.run(command, check=True, timeout=600)
    return out.read_text().splitlines()


def loops_of(lines: list[str]) -> list[Loop]:
    """Returns the innermost loops that multiply tiles: from a label to a jump back to it, no such jump between."""
    labels = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    back = [(labels[found[1]], at) for at, line in enumerate(lines) if (found := _JUMP.match(line))
            and labels.get(found[1], at) < at]  # fmt: skip
    spans = [span for span in back if any("tdp" in line for line in lines[span[0] : span[1]])]
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [_loop([line.strip() for line in lines[begin:end]]) for begin, end in inner]


def _loop(lines: list[str]) -> Loop:
    codes = [line.split()[0] for line in lines if line and not line.startswith((".", "#"))]
    kinds = {code for code in codes if code.startswith("tdp")}
    others = [line for line in lines if re.match(r"tile(?!loadd(t1)?\b)|ldtilecfg", line)]
    others += [line for line in lines if line.startswith(("tileload", "vmov")) and re.search(r"%r[sb]p", line)]
    return Loop(
        {kind: codes.count(kind) for kind in kinds},
        codes.count("tileloadd") + codes.count("tileloaddt1"),
        tuple(others),
    )


@pytest.mark.parametrize(
    ("op", "kinds"),
    [("linear", {"tdpbsud", "tdpbf16ps"}), ("paged_attention", {"tdpbssd", "tdpbusd", "tdpbf16ps"})],
)
def test_tiles_multiply_in_loops_of_nothing_but_loads_and_products(
    op: str, kinds: set[str], tmp_path: Path
) -> None:
    lines = assembly(op, tmp_path)
    loops = loops_of(lines)
    assert {kind for loop in loops for kind in loop.products} == kinds
    for loop in loops:
        assert len(loop.products) == 1, loop
        if op == "paged_attention" and "tdpbf16ps" in loop.products:  # steps take turns: one, or two
            assert (*loop.products.values(), loop.loads) in ((2, 3), (4, 6)), loop
        else:
            assert list(loop.products.values()) == [4], loop
            assert loop.loads in (4, 5), loop
        assert loop.others == (), loop
    configured, released = (sum(name in line for line in lines) for name in ("ldtilecfg", "tilerelease"))
    assert 0 < configured <= released
