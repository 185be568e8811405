"""Runs a suite in several processes that are forked after one collection: ``pytest --processes 3``.

Collecting takes 14 s of CPU in each process that does it, most of it imports; here it is done once. A file
of tests runs in one process, files are dealt in the order of collection as processes ask, and a process that dies
costs the test that it died in. Knows nothing of what is tested.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

import pytest

from baton.process.processes import die_with_parent

OPTION = "--processes"
GRACE_S = 20.0  # for a process that is interrupted to take down what its tests set up
Span = tuple[int, int]  # places of a file's first item and past its last, among all that are collected


class Hooks:
    """Declares what plugins may add to what a process tells the one that forked it."""

    @pytest.hookspec(firstresult=True)
    def pytest_process_ended(self, config: pytest.Config) -> object:
        """Returns what a forked process knows at its end."""

    def pytest_process_told(self, config: pytest.Config, told: object) -> None:
        """Takes in what a forked process knew at its end."""


def add_option(parser: pytest.Parser) -> None:
    """Adds ``--processes``."""
    parser.addoption(OPTION, type=int, default=1, help="fork so many processes after the collection; 1: none")


def configure(config: pytest.Config) -> bool:
    """Takes the loop over tests where several processes are asked for; returns whether they are."""
    config.pluginmanager.add_hookspecs(Hooks)
    count = config.getoption("processes")
    if several := count > 1 and not config.option.usepdb:
        config.pluginmanager.register(Parallel(count), "parallel")
    return several


def spans(names: Iterable[str]) -> list[Span]:
    """Returns a span for each run of tests of one file."""
    found, at = [], 0
    for _, group in groupby(names, key=lambda name: name.partition("::")[0]):
        found.append((at, at := at + len(list(group))))
    return found


def threads() -> int:
    """Returns how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


# ---- the process that collected --------------------------------------------------------------------------------


class Child(NamedTuple):
    """Is a process that runs tests, as its parent sees it."""

    pid: int
    end: int  # a pidfd, because something that a test left behind may hold the connection open
    todo: list[int]  # places of items that were dealt to it and not yet told of


class Parallel:
    """Deals files to forked processes and reports what they say, as if the tests had run here."""

    def __init__(self, count: int) -> None:
        self._count, self._threads = count, threads()
        self._spans: deque[Span] = deque()
        self._children: dict[Connection, Child] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says so
        if threads() > self._threads:
            raise pytest.UsageError("a module starts threads while it is collected, which its forks would lack")
        self._spans.extend(spans(item.nodeid for item in session.items))
        try:
            for _ in range(min(self._count, len(self._spans))):
                self._fork(session)
            while self._children and not (session.shouldfail or session.shouldstop):
                self._turn(session)
        finally:
            self._end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _turn(self, session: pytest.Session) -> None:
        """Waits until a child says something or ends, and takes in a message of each that did."""
        ready = set(wait([*self._children, *(child.end for child in self._children.values())]))
        for connection, child in list(self._children.items()):
            if connection in ready:
                self._heard(session, connection)
            elif child.end in ready:
                self._ended(session, connection)

    def _fork(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self._children):
                connection.close()
            _be_child(session, theirs)
        theirs.close()
        self._children[ours] = Child(pid, os.pidfd_open(pid), [])

    def _heard(self, session: pytest.Session, connection: Connection) -> None:
        child, hook = self._children[connection], session.config.hook
        try:
            kind, told = connection.recv()
        except (EOFError, ConnectionResetError):
            self._ended(session, connection)
            return
        if kind == "next":
            self._deal(session, connection)
        elif kind == "report":
            hook.pytest_runtest_logreport(
                report=hook.pytest_report_from_serializable(config=session.config, data=told)
            )
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=told)
        elif kind == "done":
            child.todo.remove(told)
        elif kind == "told":
            hook.pytest_process_told(config=session.config, told=told)

    def _deal(self, session: pytest.Session, connection: Connection) -> None:
        span = self._spans.popleft() if self._spans else None
        if span is not None:
            self._children[connection].todo.extend(range(*span))
        with contextlib.suppress(OSError):  # who died gets its tests back by ``_ended``
            connection.send(span)

    def _ended(self, session: pytest.Session, connection: Connection) -> None:
        """Waits for a child; of tests that it left, the first one failed, and another process takes the others."""
        child = self._children.pop(connection)
        connection.close()
        os.close(child.end)
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if not child.todo:
            return
        report = _lost(session.items[child.todo[0]], status)
        session.config.hook.pytest_runtest_logreport(report=report)
        if rest := child.todo[1:]:
            self._spans.extendleft(reversed(_runs(rest)))
        if self._spans:
            self._fork(session)

    def _end(self) -> None:
        """Interrupts what still runs, and waits for it."""
        for connection, child in self._children.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)
            connection.close()
        for child in self._children.values():
            _await_end(child)
        self._children.clear()


def _await_end(child: Child) -> None:
    """Waits for a child that was interrupted, and kills it where it doesn't end."""
    if not select.select([child.end], [], [], GRACE_S)[0]:
        signal.pidfd_send_signal(child.end, signal.SIGKILL)
    os.close(child.end)
    os.waitpid(child.pid, 0)


def _runs(places: Sequence[int]) -> list[Span]:
    """Returns spans of what follows one another in ``places``."""
    groups = groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    runs = [[place for _, place in group] for _, group in groups]
    return [(run[0], run[-1] + 1) for run in runs]


def _lost(item: pytest.Item, status: int) -> pytest.TestReport:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    said = f"the process that ran this test ended with {how}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")


# ---- a forked process ------------------------------------------------------------------------------------------


def _be_child(session: pytest.Session, connection: Connection) -> None:
    """Runs tests until there are no more, and ends this process whatever happens."""
    status = 1
    try:
        die_with_parent(signal.SIGINT)
        atexit._clear()  # what the parent began is the parent's to end
        _settle(session.config, connection)
        Tests(session, connection).run()
        connection.send(("told", session.config.hook.pytest_process_ended(config=session.config)))
        status = 0
    except (KeyboardInterrupt, BrokenPipeError):
        status = 2
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _settle(config: pytest.Config, connection: Connection) -> None:
    """Gives this process what is its own: where output is captured, where folders are made, who reports."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    base = config._tmp_path_factory.getbasetemp() / f"process-{os.getpid()}"
    base.mkdir()
    config._tmp_path_factory._basetemp = base
    reporter = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Telling(connection, config, reporter), "terminalreporter")


class Tests:
    """Runs the tests of each file that the parent deals to this process."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session, self._connection = session, connection

    def run(self) -> None:
        """Returns when there are no more files."""
        places = deque(self._next())
        while places:
            place = places.popleft()
            if not places:  # asked for now, because what the next file doesn't share is torn down after this test
                places.extend(self._next())
            item, following = self._session.items[place], self._session.items[places[0]] if places else None
            self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._connection.send(("done", place))

    def _next(self) -> range:
        self._connection.send(("next", None))
        return range(*(self._connection.recv() or (0,)))


class Telling:
    """Stands in for the terminal's reporter: tells the parent what would be shown."""

    def __init__(self, connection: Connection, config: pytest.Config, reporter: pytest.TerminalReporter) -> None:
        self._connection, self._config = connection, config
        self._tw = reporter._tw  # who shows stacks after a timeout asks the configuration for it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", told))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        plain = warnings.WarningMessage(  # classes and arguments of tests' own needn't be known there
            str(warning_message.message), UserWarning, warning_message.filename, warning_message.lineno
        )
        told = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", told))
