"""Counts what simulated runs have covered: which faults hit which kind of work, and at which awaits tasks were
cancelled.

Knows nothing of what is right. Correctness is judged elsewhere. ``await_points`` lists the awaits of the product's
source that could be covered.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, CoroutineType
from typing import TYPE_CHECKING

import baton
from baton.prefill_worker.io.service import PrefillService

if TYPE_CHECKING:
    from baton.drill.parts.life import Life
    from baton.drill.parts.worker import SimulatedWorker
    from baton.drill.scenario import Fault

PACKAGE = Path(baton.__file__).parent
ROOMS = (
    "cluster", "decode_worker/io", "kv/exchange", "kv/tiers", "prefill_worker/io", "router/dispatch",
    "router/workers", "worker/control.py", "worker/server.py", "worker/membership.py", "worker/peers.py",
    "worker/engine_watch.py", "kv/transport/auto.py", "kv/transport/grpc.py", "kv/wire", "protos/rpc.py",
)  # fmt: skip
PHASES = ("idle", "waiting", "reading", "shipping", "receiving", "writing", "preempted", "away")
Span = tuple[str, int, int]  # a file of the package, first line, last line


class Coverage:
    """Collects what one run covered: faults by their target's work, and the places where tasks were cancelled."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.cancelled_at: set[tuple[str, int]] = set()

    def fault(self, fault: Fault, workers: Mapping[str, SimulatedWorker]) -> None:
        """Counts ``fault`` under "KIND ROLE PHASE" for each phase that its target is in (see ``phases``)."""
        slot = fault.target.partition("/")[0]
        if slot not in workers:
            self.met[f"{fault.kind} router any"] += 1
            return
        worker = workers[slot]
        for phase in phases(worker.life):
            self.met[f"{fault.kind} {worker.life.role if worker.life else worker.role} {phase}"] += 1

    def cancelled(self, work: object) -> None:
        """Stores the file and line at which coroutine ``work``, about to be cancelled, waits, if those lie in the
        package.
        """
        place = awaits_at(work)
        if place is not None:
            self.cancelled_at.add(place)


def phases(life: Life | None) -> list[str]:
    """Returns which of PHASES describe the work that a worker has in progress: ["idle"] for none, ["away"] if it is
    down.
    """
    if life is None or life.runtime is None:
        return ["away"]
    running, waiting, _ = life.engine.loop.load()
    reads = isinstance(life.runtime.service, PrefillService)
    found = {
        "waiting": waiting > 0 and reads,
        "preempted": waiting > 0 and not reads,
        "reading": running > 0 and reads,
        "writing": running > 0 and not reads,
        "shipping": reads and life.runtime.service.active > running + waiting,
        "receiving": life.runtime.intake.open_streams > 0,
    }
    return [phase for phase, there in found.items() if there] or ["idle"]


def awaits_at(work: object) -> tuple[str, int] | None:
    """Returns (file, line) of the innermost frame within ``baton`` at which coroutine ``work`` waits; None if there
    is none.
    """
    found = None
    while isinstance(work, CoroutineType):
        frame = work.cr_frame
        if frame is not None and (file := _of_package(work.cr_code)):
            found = file, frame.f_lineno
        work = work.cr_await
    return found


@cache
def _of_package(code: CodeType) -> str:
    """Returns the path of the code's file relative to ``baton``; "" if it lies outside, or in the drill itself."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return ""
    file = str(path.relative_to(PACKAGE))
    return "" if file.startswith("drill") else file


@cache
def await_points() -> frozenset[Span]:
    """Returns the span (file, first line, last line) of each await expression in the files that ROOMS lists."""
    files = (found for room in ROOMS for found in _files(PACKAGE / room))
    return frozenset(span for file in files for span in _spans(file))


def reached(places: Iterable[tuple[str, int]]) -> frozenset[Span]:
    """Returns, for each (file, line) of ``places``, the innermost span of ``await_points`` that contains it."""
    found = set()
    for file, line in places:
        around = [span for span in await_points() if span[0] == file and span[1] <= line <= span[2]]
        if around:
            found.add(min(around, key=lambda span: span[2] - span[1]))
    return frozenset(found)


def _files(path: Path) -> Iterable[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _spans(path: Path) -> Iterable[Span]:
    file = str(path.relative_to(PACKAGE))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Await):
            yield file, node.lineno, node.end_lineno or node.lineno
        elif isinstance(node, ast.AsyncFor | ast.AsyncWith):
            yield file, node.lineno, node.body[0].lineno - 1
