"""Each op's suite on the GPU: the tests that run on the SIMT shim, a process each; and under compute-sanitizer.

Knows nothing of the ops. Planted bugs stay out: that the suites catch them is shown on the shim, and each would
cost a build here. Ops whose grids or kernels are chosen by the number of multiprocessors are tested for the
card's own number and for the shim's, which takes the kernels of many rows for small shapes, and gives a block
several units of work. An op's row has value 1 where all of its tests passed, 0 where one failed, and none where one
did not run to its end; ``against`` names the sources that did, ``launched`` the kernels.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module

import msgspec

from baton.kernels.cuda import build, library, on_gpu, table
from bench.cuda.isolated import Case, Outcome
from bench.cuda.rows import ROOT, Row

TESTS = "tests/kernels/cuda"
HANDOFF = "tests/kv/transport/test_card_to_card.py::test_from_process_to_process_the_bits_are_the_same"
LEFT_OUT = "not caught and not races and not race and not schedule"
# The tests of a file are of these ops; a file that isn't named is of the op in its name.
OF = {
    "row_ops": ("embedding", "kv_copy", "rms_norm", "rope_append", "swiglu"),
    **dict.fromkeys(("step", "fused_step", "layer_streams", "shared_prefixes", "rank_heads"), ("step",)),
    "branches": ("step",),
    "on_demand": ("step",),
    "ahead": ("step",),
    "long_chunks": ("step",),
    "rank_meetings": ("collective",),
    **dict.fromkeys(("linear", "prefill", "split", "dispatch", "by_row"), ("linear",)),
    "verify": ("paged_attention",),
    "branches_at_once": ("megakernel",),
    "paged_attention": ("paged_attention",),
}
NOT_OPS = {"shim", "gates", "table", "meetings"}
# Multiprocessors that dispatch takes a card to have beside its own number, and the shim, which has three.
AS_SHIM, AS_CARD = 3, 132
QUICK = "quick"  # the part of rows of a suite's quick tests alone, which the table of what ran doesn't count
FIRST = ("linear", "paged_attention", "step", "embedding", "lm_head")  # ops without which no step is right
LAST = ("megakernel", "collective")  # whose blocks wait for one another, so that what is wrong may hang
TOOLS = ("memcheck", "racecheck")
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
COLLECT_S, TEST_S, TOOL_S = 60.0, 60.0, 240.0  # limits of a listing, a test, a file under a tool


def files() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Ops, and the test files that are of them."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for path in sorted((ROOT / TESTS).glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        if name not in NOT_OPS:
            ops = OF.get(name, (name,))
            found[ops] = (*found.get(ops, ()), f"{TESTS}/{path.name}")
    return found


def sanitizer() -> str | None:
    """compute-sanitizer, where it is here."""
    return next((path for path in map(shutil.which, SANITIZERS) if path), None)


def listing(thorough: bool = True) -> Case:
    """A case whose rows are named as the tests; ``thorough``: those too that don't run in every suite. A file of
    which none does has all of its tests either way.
    """
    asked = [*(file for tests in files().values() for file in tests), HANDOFF]
    return Case("listing", "tests", partial(_listed, asked, thorough), COLLECT_S)


def _listed(asked: Sequence[str], thorough: bool) -> Iterator[Row]:
    tests = _collected(asked, thorough)
    if bare := [file for file in asked if not any(test.startswith(file) for test in tests)]:
        tests += _collected(bare, True)
    for test in tests:
        yield Row(part="listing", name=test, value=1.0)


def _collected(asked: Sequence[str], thorough: bool) -> list[str]:
    """Returns the names of the tests of the files ``asked``. Raises RuntimeError if there are none."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = _pytest(["--collect-only", "-k", LEFT_OUT, *_marks(thorough), "-p", "no:cacheprovider", *asked])
    print(said.getvalue())
    tests = [line for line in said.getvalue().splitlines() if "::" in line]
    if status or not tests:  # with a -q more than its settings have, it would only count them
        raise RuntimeError(f"pytest lists {len(tests)} tests (status {status})")
    return tests


def _marks(thorough: bool) -> list[str]:
    """Returns the arguments by which pytest takes tests that don't run in every suite, too."""
    return ["-m", ""] if thorough else []


def _pytest(arguments: list[str]) -> int:
    """Runs the tests' own runner in this process; it is asked for by name, because benches stand without it."""
    return int(import_module("pytest").main(arguments))


def cases(tests: Iterable[str], limit_s: float | None = None) -> list[Case]:
    """A case for each test, by the names that ``listing`` gave; then those that another number of multiprocessors
    changes once more, for that number. None takes more than ``limit_s`` seconds (TEST_S).
    """
    names, other = list(tests), AS_SHIM if on_gpu.asked() else AS_CARD
    again = [test for test in names if _changes(test)]
    limit = TEST_S if limit_s is None else limit_s
    return [_case(test, 0, limit) for test in names] + [_case(test, other, limit) for test in again]


def _case(test: str, processors: int, limit_s: float) -> Case:
    name = f"{test} as of {processors} processors" if processors else test
    return Case("checks", name, partial(_tested, test, processors), limit_s)


def _changes(test: str) -> bool:
    """Tells whether the number of multiprocessors changes what a test launches: on a card the kernels or the units
    of a block, on the shim the kernels alone, because blocks without work take its time.
    """
    ops = next((ops for ops, files_ in files().items() if test.partition("::")[0] in files_), ())
    return any(op in by_processors() if on_gpu.asked() else op == "linear" for op in ops)


@cache
def by_processors() -> frozenset[str]:
    """Returns the ops that ask for the number of multiprocessors in their own files."""
    asked = (op for op in build.ops() for path in build.source(op).parent.rglob("*.cu*") if _asks(path.read_text()))
    return frozenset(asked)


def _asks(text: str) -> bool:
    return "processors()" in text


def _tested(test: str, processors: int) -> Iterator[Row]:
    os.environ[library.LAUNCHES_ENV] = "1"  # of this child
    if processors:
        os.environ[library.PROCESSORS_ENV] = str(processors)
    if on_gpu.asked():
        on_gpu.heap_only()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        _pytest(["-q", "-p", "no:cacheprovider", *_marks(True), test])
    row = verdict(test, said.getvalue())
    launched = tuple(sorted(library.launched())) if row.value == 1 else ()
    yield msgspec.structs.replace(row, launched=launched)
    print(said.getvalue())


def verdict(test: str, output: str) -> Row:
    """Returns a test's row from pytest's output: 1 if it passed, 0 if it failed, None if it was skipped."""
    passed = ran_something(output)
    value = 1.0 if passed else None if re.search(r"^\d* ?skipped|^s+\s+\[", output, re.M) else 0.0
    return Row(part="test", name=test, value=value, unit="passed", said=summary(output))


def grouped(cases: Iterable[Case]) -> dict[tuple[str, ...], list[Case]]:
    """Returns the cases by the ops that they are of: FIRST in its order, then the others, LAST at the end. The
    handoff from card to card is of no op.
    """
    of_file = {file: ops for ops, tests in files().items() for file in tests}
    found: dict[tuple[str, ...], list[Case]] = {ops: [] for ops in sorted(files(), key=_turn)}
    for case in cases:
        found.setdefault(of_file.get(case.name.partition("::")[0], ()), []).append(case)
    return found


def _turn(ops: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    if ops[0] in LAST:
        return len(FIRST) + 1, ops
    return (FIRST.index(ops[0]) if ops[0] in FIRST else len(FIRST)), ops


def rows_of(ops: tuple[str, ...], outcomes: Sequence[Outcome], part: str = "checks") -> Iterator[Row]:
    """Yields a row of ``part`` for each of ``ops``, from how their tests went; without ops, of the handoff from
    card to card.
    """
    launched = {kernel for each in outcomes for row in each.rows for kernel in row.launched}
    value, said = _together(outcomes)
    for op in ops:
        key = build.source_key(op)
        kernels = tuple(table.of_op(launched, op))
        yield Row(part=part, name=op, value=value, unit="passed", against=key, said=said, launched=kernels)
    if not ops:
        yield Row(part="handoff", name="from card to card, two processes", value=value, unit="passed", said=said)


def _together(outcomes: Sequence[Outcome]) -> tuple[float | None, str]:
    found = [each.rows[0].value if each.rows and not each.said else 0.0 for each in outcomes if not each.unrun]
    unrun = [each for each in outcomes if each.unrun]
    counts = (
        f"{found.count(1.0)} passed, {found.count(0.0)} failed, {found.count(None)} skipped, {len(unrun)} not run"
    )
    wrong = [each for each in outcomes if each.said or (each.rows and each.rows[0].value == 0.0)]
    first = f"; {wrong[0].case.name.rpartition('/')[2]}: {wrong[0].said or wrong[0].rows[0].said}" if wrong else ""
    if 0.0 in found:
        return 0.0, (counts + first)[:300]
    return (1.0 if 1.0 in found and not unrun else None), counts


def under_tools() -> list[Case]:
    """Each op's files under each of compute-sanitizer's tools; none where it isn't here."""
    tool = sanitizer()
    if tool is None:
        return []
    prefix = [tool, "--error-exitcode=9", "--target-processes=all"]
    return [
        Case(name, ", ".join(ops), partial(_under, [*prefix, f"--tool={name}"], name, ops, tests), TOOL_S)
        for name in TOOLS
        for ops, tests in files().items()
    ]


def _under(prefix: Sequence[str], tool: str, ops: Sequence[str], tests: Sequence[str]) -> Iterator[Row]:
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = float(done.returncode == 0 and ran_something(done.stdout))
    yield Row(part=tool, name=", ".join(ops), value=passed, unit="passed", said=summary(done.stdout))
    print(done.stdout)


def summary(output: str) -> str:
    """Returns the last error line of a tool's output, else its last line."""
    errors = [
        line
        for line in output.splitlines()
        if line.startswith(("E  ", "FAILED", "========= Invalid", "========= Error"))
    ]
    lines = [line for line in output.splitlines() if line.strip()]
    return " ".join((errors or lines or ["nothing was said"])[-1].split())[:300]


def ran_something(output: str) -> bool:
    """A file whose tests were all skipped has shown nothing, and one with a failure has passed nothing."""
    return re.search(r"^[.sx]*\.[.sx]*\s+\[", output, re.M) is not None
