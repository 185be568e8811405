"""Everything that a GPU can show of the CUDA kernels, in one go: built, checked, measured, served.

    .venv/bin/python bench/gpu.py [--only checks,attention,step] [--seconds 560] [--json bench/results/gpu.json]
    .venv/bin/python bench/gpu.py --dry

Needs an H100 or H200, a driver for CUDA 13, torch's CUDA build, and nvcc or a library that was built ahead
($BATON_KERNELS_DIR; python -m baton.kernels.cuda.build DIR); no network. In order: ceilings of this card, now; each
op's suite, under compute-sanitizer too where it is found; each op's share of a ceiling, beside torch, cuBLAS and
Triton; a whole step of an 8B Llama; the demo model 1P1D on one card. What the time doesn't allow is said, and
--only takes it up in another call: rows of one machine and commit are kept together in the file. --dry needs no
GPU: it runs every measured call once at tiny sizes on the SIMT shim.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from baton.engine.backends.cuda.gpu import require
from baton.kernels.abi.build import BuildError
from baton.kernels.cuda.library import CudaLibrary, device
from baton.protos.errors import ConfigError
from bench.cuda import rows as shown
from bench.cuda.rows import RESULTS, Row, absent

SECONDS = 560.0
CHECKS, STEP, SERVED = "checks", "step", "served"
OPS = ("rows", "attention", "cascade", "linear", "head", "kv", "small", "experts", "drafts", "prompts")
PARTS = (CHECKS, *OPS, STEP, SERVED)
CHECKS_SHARE = 0.45  # of the time, where other parts are asked for as well
LEAST_S = 5.0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parsed; an unknown part is said with the choices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"at most ({SECONDS:.0f})")
    parser.add_argument("--dry", action="store_true", help="no GPU: every call once, tiny, on the SIMT shim")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", help="where rows are kept")
    asked = parser.parse_args(argv)
    asked.only = [name for name in asked.only.split(",") if name]
    if unknown := [name for name in asked.only if name not in PARTS]:
        parser.error(f"--only: no part {', '.join(unknown)}; there is {', '.join(PARTS)}")
    if asked.seconds <= LEAST_S:
        parser.error(f"--seconds: {asked.seconds:g} is too few; take more than {LEAST_S:g}")
    return asked


def needs() -> str:
    """In one sentence, what is missing here; empty where nothing is."""
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


def within(parts: Sequence[tuple[str, Callable[[float], Iterator[Row]]]], until: float) -> Iterator[Row]:
    """Each part's rows, as long as there is time; a part that fails is a row and doesn't end the others."""
    for name, make in parts:
        if time.monotonic() > until - LEAST_S:
            yield absent(name, "all", "not run: the time was up; take it up with --only " + name)
            continue
        share = CHECKS_SHARE if name == CHECKS and len(parts) > 1 else 1.0
        mine = time.monotonic() + (until - time.monotonic()) * share
        try:
            for row in make(mine):
                yield row
                if time.monotonic() > mine - LEAST_S and name != CHECKS:
                    yield absent(name, "the rest", "not run: the time was up; take it up with --only " + name)
                    break
        except Exception as error:  # one part's fault is not the others'
            yield absent(name, "the rest", f"{type(error).__name__}: {error}")


def plan(
    only: Sequence[str], loaded: CudaLibrary, top: shown.Ceilings
) -> list[tuple[str, Callable[[float], Iterator[Row]]]]:
    """The parts asked for, in order."""
    from bench.cuda import cases, checks, prompts, served, small, step
    from bench.cuda.ops import Ops

    ops = Ops(loaded)
    made: dict[str, Callable[[float], Iterator[Row]]] = {CHECKS: checks.checks, SERVED: served.served}
    for name, part in {**cases.PARTS, **small.PARTS, **prompts.PARTS}.items():
        made[name] = lambda _, part=part: part(ops, top)  # type: ignore[misc]
    made[STEP] = lambda _: step.steps(loaded, top)
    return [(name, made[name]) for name in PARTS if name in only]


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
    if missing := needs():
        print(missing, file=sys.stderr)
        return 2
    import torch

    from bench.cuda.cases import ceilings

    place = shown.where(torch.cuda.get_device_name())
    print(f"{place.machine}, commit {place.commit}, {place.date}", flush=True)
    top, rows = ceilings()
    for row in within(plan(asked.only, device(), top), until):
        rows.append(row)
        print(shown.table([row]).splitlines()[-1], flush=True)
        shown.write(asked.json, place, rows)  # what is there stays, whatever ends the run
    shown.write(asked.json, place, rows)
    print(f"\n{shown.table(rows)}\n\nkept in {asked.json}")
    return int(any(row.value == 0 for row in rows if row.unit == "passed"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
