"""Runs cases, each in a process of its own that is forked from this one, under a time limit.

Knows nothing of GPUs. This process must never touch CUDA: each child starts its own context, so that a hang, an
illegal address or a crash ends with the child it happened in. Rows come over a pipe as they are made: what a child
found before it ended is kept.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import msgspec

from bench.cuda.rows import Row

TAIL = 3000  # bytes of a failed child's output that are kept
LEAST_S = 3.0  # seconds below which no case begins
REAP_S = 10.0  # seconds that a killed child has to end; a driver may hold on to one whose kernel hangs


class Case(NamedTuple):
    """Names rows to make: ``make`` runs in the child, for ``limit_s`` seconds at most."""

    part: str
    name: str
    make: Callable[[], Iterable[Row]]
    limit_s: float


class Outcome(NamedTuple):
    """Holds how a case went: its rows, seconds, what was wrong (empty: nothing) and the end of what it printed."""

    case: Case
    rows: tuple[Row, ...]
    seconds: float
    said: str
    output: str

    @property
    def unrun(self) -> bool:
        """Tells whether there was no time left to begin the case."""
        return not self.rows and self.said.startswith("not run")


class Child:
    """Is one case that runs. The parent reads rows by ``take`` until it says that the child has ended."""

    def __init__(self, case: Case, until: float) -> None:
        self.case, self.began = case, time.monotonic()
        self.until = min(until, self.began + case.limit_s)
        self._rows: list[Row] = []
        self._rest, self._said = b"", ""
        self._log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  closed in ``end``
        self.pipe, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _be_child(case, theirs, self._log.fileno())
        with contextlib.suppress(PermissionError):  # it has done so itself and is further already
            os.setpgid(self.pid, self.pid)  # as it does, because ``kill`` may come before its first instruction
        os.close(theirs)

    def take(self) -> list[Row] | None:
        """Returns rows that have come, or None where the child has closed its pipe."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [msgspec.json.decode(line, type=Row) for line in lines]
        self._rows += found
        return found

    def _take_rest(self) -> None:
        """Keeps rows that it had written when its time was up."""
        os.set_blocking(self.pipe, False)
        with contextlib.suppress(BlockingIOError):
            while self.take() is not None:
                continue

    def kill(self) -> None:
        """Ends the child and all that it started, because its time is up."""
        self._said = f"killed after {time.monotonic() - self.began:.0f} s"
        os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> Outcome:
        """Waits for the child, which has closed its pipe or was killed; returns how it went. One that is killed and
        doesn't end is left alone.
        """
        status = self._status()
        self._take_rest()
        os.close(self.pipe)
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - TAIL))
        output = self._log.read().decode(errors="replace")
        self._log.close()
        said = self._said or (f"ended by {signal.Signals(-status).name}" if status < 0 else "")
        if status > 0:
            said = said or (output.strip().splitlines() or [f"status {status}"])[-1][:300]
        kept = output if said or any(row.unit == "passed" and row.value == 0 for row in self._rows) else ""
        return Outcome(self.case, tuple(self._rows), time.monotonic() - self.began, said, kept)

    def _status(self) -> int:
        until = time.monotonic() + REAP_S if self._said else float("inf")
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG if self._said else 0)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= until:
                self._said += f", and has not ended {REAP_S:.0f} s later"
                return -signal.SIGKILL
            time.sleep(0.02)


def run(
    cases: Sequence[Case], until: float, jobs: int = 1, seen: Callable[[Row], None] = lambda row: None
) -> Iterator[Outcome]:
    """Runs cases in order, ``jobs`` at a time, and yields each as it ends; one that can't begin before ``until``
    (by time.monotonic) yields so. ``seen`` is called with each row as it comes.
    """
    waiting, running = list(cases), dict[int, Child]()
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    case = waiting.pop(0)
                    if time.monotonic() > until - LEAST_S:
                        yield Outcome(case, (), 0.0, "not run: the time was up", "")
                        continue
                    child = Child(case, until)
                    running[child.pipe] = child
                    selector.register(child.pipe, selectors.EVENT_READ)
                yield from _advanced(selector, running, seen)
        finally:
            for child in running.values():
                child.kill()
                child.end()


def _advanced(
    selector: selectors.BaseSelector, running: dict[int, Child], seen: Callable[[Row], None]
) -> Iterator[Outcome]:
    """Waits for rows, an end or a limit, and yields what ended."""
    left = min((child.until for child in running.values()), default=time.monotonic()) - time.monotonic()
    ready = {key.fd for key, _ in selector.select(max(0.0, left))} if running else set()
    for fd, child in list(running.items()):
        rows = child.take() if fd in ready else []
        for row in rows or ():
            seen(row)
        late = time.monotonic() >= child.until
        if rows is not None and not late:
            continue
        if late and rows is not None:
            child.kill()
        selector.unregister(fd)
        del running[fd]
        yield child.end()


def _be_child(case: Case, pipe: int, log: int) -> None:
    """Makes the rows and ends this process, whatever happens in it."""
    status = 1
    try:
        os.setpgid(0, 0)
        for output in (1, 2):
            os.dup2(log, output)
        sys.stdout = sys.stderr = os.fdopen(log, "w", closefd=False)  # whatever stood in for them before the fork
        for row in case.make():
            os.write(pipe, msgspec.json.encode(row) + b"\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
