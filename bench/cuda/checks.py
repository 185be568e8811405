"""Each op's suite on the GPU: the very tests that run on the SIMT shim, and again under compute-sanitizer.

Knows nothing of the ops. Planted bugs stay out: that the suites catch them is shown on the shim, and each would
cost a build here. A row's value is 1 where everything passed, 0 where something failed, and none where it did not
run to its end; ``against`` names the sources that did.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from baton.kernels.cuda import build
from baton.kernels.cuda.on_gpu import ON_GPU_ENV
from bench.cuda.rows import ROOT, Row

TESTS = "tests/kernels/cuda"
HANDOFF = "tests/kv/transport/test_card_to_card.py::test_from_process_to_process_the_bits_are_the_same"
LEFT_OUT = "not caught and not races and not race and not schedule"
# The tests of a file are of these ops; a file that isn't named is of the op in its name.
OF = {
    "row_ops": ("embedding", "kv_copy", "rms_norm", "rope_append", "swiglu"),
    **dict.fromkeys(("step", "fused_step", "layer_streams", "shared_prefixes"), ("step",)),
    **dict.fromkeys(("linear", "prefill"), ("linear",)),
    "verify": ("paged_attention",),
    "paged_attention": ("paged_attention",),
}
NOT_OPS = {"shim", "gates", "table", "meetings"}
TOOLS = ("memcheck", "racecheck")
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


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


def checks(until: float) -> Iterator[Row]:
    """Every op's suite, then each under each tool; ``until`` by time.monotonic."""
    asked = files()
    for ops, tests in asked.items():
        said, passed = run([sys.executable], tests, until)
        for op in ops:
            yield Row(part="checks", name=op, value=passed, unit="passed", against=build.source_key(op), said=said)
    said, passed = run([sys.executable], [HANDOFF], until)
    yield Row(part="handoff", name="from card to card, two processes", value=passed, unit="passed", said=said)
    tool = sanitizer()
    for name in TOOLS if tool else ():
        for ops, tests in asked.items():
            prefix = [str(tool), f"--tool={name}", "--error-exitcode=9", "--target-processes=all", sys.executable]
            said, passed = run(prefix, tests, until)
            yield Row(part=name, name=", ".join(ops), value=passed, unit="passed", said=said)
    if tool is None:
        yield Row(
            part="memcheck", name="all", said="compute-sanitizer is not on PATH: neither memcheck nor racecheck ran"
        )


def run(prefix: Sequence[str], tests: Sequence[str], until: float) -> tuple[str, float | None]:
    """What pytest said last, and 1 where all passed, 0 where not, None where the time was up."""
    left = until - time.monotonic()
    if left < 5:
        return "not run: the time was up; take it up with --only checks", None
    command = [*prefix, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", LEFT_OUT, *tests]
    environment = {**os.environ, ON_GPU_ENV: "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not finished in the {left:.0f} s that were left", None
    return summary(done.stdout), float(done.returncode == 0 and ran_something(done.stdout))


def summary(output: str) -> str:
    """What went wrong first, else pytest's last line."""
    errors = [
        line
        for line in output.splitlines()
        if line.startswith(("E  ", "FAILED", "========= Invalid", "========= Error"))
    ]
    lines = [line for line in output.splitlines() if line.strip()]
    return " ".join((errors or lines or ["nothing was said"])[-1].split())[:300]


def ran_something(output: str) -> bool:
    """A file whose tests were all skipped has shown nothing."""
    return re.search(r"^[.sx]*\.[.sx]*\s+\[", output, re.M) is not None
