"""Counts what CPU time each file of tests costs, its child processes included: ``make test-times``.

CPU seconds tell what a suite costs whatever else runs on the machine; wall time doesn't. A child counts with the
children that it waited for itself; processes that were orphaned are missing. Knows nothing of what is tested.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

OPTION = "--cpu-times"
SHARE_SHOWN = 0.9  # of all CPU seconds is in the files that are listed, because the rest is noise


def spent() -> tuple[float, float]:
    """Returns CPU seconds so far: of this process, and of its children with those that they waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, children = (usage.ru_utime + usage.ru_stime for usage in used)
    return own, children + _of_the_living()


def _of_the_living() -> float:
    """Returns the CPU seconds of children that nobody has waited for yet."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class CpuTimes:
    """Adds up seconds per file in each process of a run, and prints the sum of all at its end."""

    def __init__(self) -> None:
        self.own: Counter[str] = Counter()
        self.children: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        return (yield from self._counted("(collection)")) if isinstance(collector, pytest.Module) else (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._counted(item.nodeid.partition("::")[0]))

    def _counted(self, name: str) -> Iterator[None]:
        began, (own, children) = time.monotonic(), spent()
        result = yield
        own_now, children_now = spent()
        self.own[name] += own_now - own
        self.children[name] += children_now - children
        self.wall[name] += time.monotonic() - began
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_times"] = [dict(self.own), dict(self.children), dict(self.wall)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        for total, part in zip((self.own, self.children, self.wall), node.workeroutput["cpu_times"], strict=True):
            total.update(part)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        spent_in = self.own + self.children
        left, write = SHARE_SHOWN * spent_in.total(), terminalreporter.write_line
        write(f"{spent_in.total():.1f} CPU seconds; the files that cost most of them:")
        write(f"{'own':>8}{'children':>10}{'wall':>8}")
        for name, seconds in spent_in.most_common():
            if left > 0:
                write(f"{self.own[name]:8.1f}{self.children[name]:10.1f}{self.wall[name]:8.1f}  {name}")
            left -= seconds
