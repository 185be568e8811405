"""Everything that a GPU can show of the CUDA kernels, in one go: checked, measured, served.

    python bench/gpu.py --plan first [--out FOLDER]      what matters most, within ten minutes; then --plan second
    python bench/gpu.py [--only checks,shapes,attention,step] [--seconds 560] [--out FOLDER]
    python bench/gpu.py --dry            every measured call once at tiny sizes on the SIMT shim
    python bench/gpu.py --rehearse       the same as on a GPU, process by process, on the SIMT shim

Needs an H100 or H200, a driver for CUDA 13, any torch 2.11 or newer with CUDA, and nvcc or a library that was built
ahead ($BATON_KERNELS_DIR; python -m baton.kernels.cuda.build DIR); no network. bench/on_card.py starts it on a
machine that has nothing of ours. Every test and every part runs in a process of its own under a time limit: what
hangs or crashes is a row, and the others go on. Rows are appended to FOLDER/rows.jsonl as they come;
FOLDER/parts.json says how long each part took, FOLDER/failed.log what failed cases printed, FOLDER/gpu.json keeps
the rows of one machine and commit ($BATON_COMMIT where there is no git) together.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from baton.engine.backends.cuda.gpu import require
from baton.kernels.abi.build import BuildError
from baton.kernels.cuda import build
from baton.kernels.cuda.library import CudaLibrary, device
from baton.kernels.cuda.on_gpu import ON_GPU_ENV
from baton.protos.errors import ConfigError
from bench.cuda import rows as shown
from bench.cuda.isolated import Case, Outcome, run
from bench.cuda.results import Results
from bench.cuda.rows import RESULTS, Row

if TYPE_CHECKING:
    from bench.cuda.ops import Ops

SECONDS = 560.0
CHECKS, SHAPES, TOOLS, STEP, SERVED = "checks", "shapes", "tools", "step", "served"
OPS = (
    "rows", "attention", "cascade", "linear", "head", "kv", "small", "experts", "drafts", "prompts", "products",
)  # fmt: skip
PARTS = (CHECKS, SHAPES, *OPS, STEP, SERVED, TOOLS)
DEFAULT = PARTS[:-1]  # under compute-sanitizer suites take longer than everything else
LIMITS = {STEP: 240.0, SERVED: 150.0, SHAPES: 120.0}  # seconds of a case; others 90
CASE_S, START_S = 90.0, 60.0
JOBS = 10  # tests at a time: each has a context on the card and a core, and small work
LEAST_S = 5.0
OPS_THAT_HANG = 3  # whose tests may take their share of a plan's checks, before the next op has none
MANY = 6  # cases of a part, of which none takes a large share of its time
# Calls within a lease of fifteen minutes, starts of the machine included: parts in their order, and at most how
# many seconds each takes. Checks are then the quick ones.
PLANS: dict[str, dict[str, float]] = {
    "first": {
        CHECKS: 150, STEP: 130, "products": 40, "prompts": 50, SERVED: 90, SHAPES: 60,
    },
    "second": {SHAPES: 50, "attention": 30, "linear": 40, "head": 20, "rows": 15, "cascade": 20, "kv": 15},
}  # fmt: skip


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; an unknown part ends it with a message that lists the choices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"of {', '.join(PARTS)}; default all but tools")
    parser.add_argument("--plan", choices=PLANS, help="parts and their seconds, for one call of a short lease")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"at most ({SECONDS:.0f})")
    parser.add_argument("--dry", action="store_true", help="no GPU: every call once, tiny, on the SIMT shim")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: all cases and processes, on the SIMT shim")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"tests at a time ({JOBS})")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder that rows are kept in")
    asked = parser.parse_args(argv)
    asked.shares = PLANS.get(asked.plan, {})
    asked.only = [*asked.shares] or [name for name in asked.only.split(",") if name]
    if unknown := [name for name in asked.only if name not in PARTS]:
        parser.error(f"--only: no part {', '.join(unknown)}; there is {', '.join(PARTS)}")
    if asked.seconds <= LEAST_S:
        parser.error(f"--seconds: {asked.seconds:g} is too few; take more than {LEAST_S:g}")
    return asked


def needs() -> str:
    """Says in one sentence what is missing here; empty where nothing is. Starts a context: call it in a child."""
    try:
        require()
    except ConfigError as error:
        return f"bench/gpu.py needs an H100 or H200: {error.message}"
    import torch

    if not torch.cuda.is_available():
        return f"bench/gpu.py needs torch's CUDA build: this is {torch.__version__}"
    try:
        device()
    except BuildError as error:
        return f"bench/gpu.py needs the CUDA kernels: {error}"
    return ""


def machine() -> Iterator[Row]:
    """A row that names the card, or says what is missing."""
    if missing := needs():
        yield Row(part="machine", name="", said=missing)
        return
    import torch

    yield Row(part="machine", name=torch.cuda.get_device_name(), value=1.0)


def ceilings() -> Iterator[Row]:
    """Yields the rows of what this card can do at all."""
    from bench.cuda.cases import ceilings as measured

    yield from measured()[1]


def top_of(rows: Sequence[Row]) -> shown.Ceilings:
    """The ceilings that those rows are of."""
    read, copy, flops = (float(row.value or 0) for row in rows)
    return shown.Ceilings(read * 1e9, copy * 1e9, flops * 1e12)


Make = Callable[[], Iterable[Row]]


class Session:
    """Runs the parts that are asked for, one after the other, as long as there is time."""

    def __init__(self, asked: argparse.Namespace, results: Results, until: float) -> None:
        self._asked, self._results, self._until = asked, results, until
        self._top = shown.Ceilings(1.0, 1.0, 1.0)

    def run(self) -> None:
        """Measures the ceilings, then each part."""
        found = self._cases("ceilings", [Case("ceilings", "card", ceilings, CASE_S)])
        if len(found) != 1 or len(found[0].rows) != 3:
            return
        if not self._asked.rehearse:  # there they are anything, also nothing
            self._top = top_of(found[0].rows)
        for name in self._asked.shares or (name for name in PARTS if name in self._asked.only):
            whole = self._until
            self._until = min(whole, time.monotonic() + self._asked.shares.get(name, float("inf")))
            self._checks() if name == CHECKS else self._part(name)
            self._until = whole

    def _checks(self) -> None:
        """Runs the tests op by op, those on which most depends first, and says of each op at once how they went."""
        from bench.cuda import checks

        thorough = not (self._asked.rehearse or self._asked.plan)
        [listed] = self._cases("listing", [checks.listing(thorough)])
        share, whole = self._asked.shares.get(CHECKS, float("inf")), self._until
        limit = min(checks.TEST_S, share / (2 * OPS_THAT_HANG))
        of_op = checks.grouped(checks.cases([row.name for row in listed.rows], limit))
        for ops, cases in of_op.items():
            self._until = min(whole, time.monotonic() + share / OPS_THAT_HANG)
            found = self._cases(f"{CHECKS}: {', '.join(ops)}", cases, self._asked.jobs)
            self._until = whole
            for row in checks.rows_of(ops, found, checks.QUICK if self._asked.plan else CHECKS):
                self._results.add(row)

    def _part(self, name: str) -> None:
        made, limit = self._made(name), LIMITS.get(name, CASE_S)
        if share := self._asked.shares.get(name):  # one that hangs leaves the others some
            limit = min(limit, 1.5 * share / max(1, len(made)) if len(made) < MANY else share)
        self._cases(name, [Case(name, of, make, limit) for of, make in made])

    def _made(self, name: str) -> Sequence[tuple[str, Make]]:
        from bench.cuda import cases, checks, products, prompts, served, shapes, small, step
        from bench.cuda.ops import Ops

        def of(make: Callable[..., Iterable[Row]], *rest: object) -> Make:
            return lambda: make(Ops(library()), *rest)  # loaded in the child

        if name == TOOLS:
            return [(case.name, case.make) for case in checks.under_tools()]
        if name == SERVED:
            how = ("cpu", "tcp") if self._asked.rehearse else ("cuda", "cuda_ipc")
            return [("1P1D", partial(served.served, *how))]
        if name == STEP:
            return [(kind, partial(_step, self._top, kind)) for kind in step.KINDS]
        if name == SHAPES:
            return [(of_, of(partial(_shape, of_))) for of_ in shapes.names()]
        part = {**cases.PARTS, **small.PARTS, **prompts.PARTS, **products.PARTS}[name]
        return [(name, of(part, self._top))]

    def _cases(self, part: str, cases: Sequence[Case], jobs: int = 1) -> list[Outcome]:
        began, found = time.monotonic(), []
        for outcome in run(cases, self._until, jobs, self._results.add):
            found.append(outcome)
            self._results.end(outcome)
        self._results.part(part, found, time.monotonic() - began)
        return found


def _shape(name: str, ops: Ops) -> Iterator[Row]:
    from bench.cuda import shapes

    yield from dict(shapes.parts(ops))[name]()


def _step(top: shown.Ceilings, kind: str) -> Iterator[Row]:
    from bench.cuda import step

    yield from step.steps(library(), top, kinds=(kind,))


def library() -> CudaLibrary:
    """The library of this process: for the card, or the shim in a rehearsal."""
    from bench.cuda.extent import used

    return device() if used().device == "cuda" else CudaLibrary(build.simt())


def dry() -> int:
    """Every measured call once on the SIMT shim; 1 where one has no figure."""
    from bench.cuda import dry as without

    try:
        with without.tiny() as tiny:
            found = list(without.parts(tiny))
    except BuildError as error:
        print(f"bench/gpu.py --dry needs a C++ compiler: {error}", file=sys.stderr)
        return 2
    absent_rows = [row for row in found if row.value is None]
    for row in absent_rows:
        print(f"{row.part}: {row.name}: {row.said}", file=sys.stderr)
    print(f"{len(found)} rows, {len(absent_rows)} without a figure; nothing was measured")
    return int(bool(absent_rows))


def main(argv: Sequence[str]) -> int:
    """Run, print the table, keep the rows; 2 where this machine lacks something, 1 where a check failed."""
    asked = arguments(argv)
    until = time.monotonic() + asked.seconds
    if asked.dry:
        return dry()
    import torch  # noqa: F401  here, so that children needn't

    with ExitStack() as stack:
        name = "the SIMT shim"
        if asked.rehearse:
            from bench.cuda import dry as without

            stack.enter_context(without.tiny())
        else:
            os.environ[ON_GPU_ENV] = "1"
            [found] = run([Case("machine", "card", machine, START_S)], until)
            if found.said or not found.rows[0].value:
                print(found.said or found.rows[0].said, file=sys.stderr)
                return 2
            name = found.rows[0].name
        place = shown.where(name)
        print(f"{place.machine}, commit {place.commit}, {place.date}", flush=True)
        results = Results(asked.out, place)
        Session(asked, results, until).run()
    print(results.summary(), flush=True)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
