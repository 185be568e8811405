"""Collects the tests of a parallel run once; pytest-xdist's processes are forks of the one that did.

Collecting takes 11 s of CPU, most of it imports, and each process would do it for itself. xdist starts ``joining``
as Python for each of its processes. That asks the one that has collected for a fork, which speaks with xdist as
``xdist.remote`` does. Knows nothing of what is tested.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.config import _prepareconfig

from baton.process.processes import die_with_parent
from tests import warm
from tests.parallel import handover, joining

ONE = {"workerid": "gw0", "workercount": 1, "testrunuid": "", "mainargv": sys.argv}
"""What tells plugins that this process belongs to a parallel run, before xdist says which one it is."""

LATE = {"anthropic": "router"}  # what takes seconds to import, and the folder whose files import it late
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # as numpy is imported: a fork would lack the others


# ---- the process that the run was started as -------------------------------------------------------------------


def share(config: pytest.Config) -> None:
    """Starts the process that collects, and has xdist's processes be its forks."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen()
    name, fd = listener.getsockname(), listener.fileno()
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.collected", str(fd), *map(str, config.invocation_params.args)],
            pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ | ONE_THREAD,
        )  # fmt: skip
    python = f"{sys.executable} -I -S {Path(joining.__file__)} {name.hex()}"
    config.option.tx = [f"popen//python={python}"] * config.option.numprocesses
    config.pluginmanager.register(Run(process))


class Run:
    """Tells xdist what its processes are to run, and ends the process that collected after them."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_getremotemodule(self) -> ModuleType:
        return handover

    def pytest_unconfigure(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ---- the process that collects, and its forks ------------------------------------------------------------------


class Collected:
    """Forks for each process that joins once all is collected; a fork goes on as one of xdist's."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._life = os.dup(0)  # ends with who started us; pytest takes the descriptor itself
        self._reports: list[pytest.CollectReport] = []
        self._starts_threads = ""  # the module that did first
        self._channel: Any = None
        self._has_channel, self._ended = threading.Event(), threading.Event()
        self._conversation = threading.Thread(target=self._converse, daemon=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not self._starts_threads and len(os.listdir("/proc/self/task")) > 1:
            self._starts_threads = report.nodeid
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self._starts_threads:
            raise pytest.UsageError(f"{self._starts_threads} starts a thread as it is collected, which forks lack")
        for name, folder in LATE.items():
            if any(f"tests/{folder}/" in item.nodeid for item in session.items):
                importlib.import_module(name)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # forks clean up after themselves, and this one awaits them
        _, fds = warm.serve(self._listener, self._life, len(joining.STANDARD))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(signal.SIGINT)
        os.close(self._life)
        self._join(session.config, fds)
        return self._run(session)

    def _join(self, config: pytest.Config, fds: list[int]) -> None:
        """Makes ``fds`` this fork's standard files, and waits until xdist has given it a channel."""
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        self._conversation.start()
        self._has_channel.wait()
        capture.start_global_capturing()
        capture.suspend_global_capture()

    def _converse(self) -> None:
        """Runs what execnet sends to each Python that it starts; this one doesn't occupy the main thread."""
        exec(eval(sys.stdin.readline()), {"__name__": "execnet_worker"})

    def hand_over(self, channel: Any) -> None:
        """Gives ``channel`` to the session, and returns after its end."""
        self._channel = channel
        self._has_channel.set()
        self._ended.wait()

    def _run(self, session: pytest.Session) -> bool:
        """Runs the tests that xdist wants, and tells it what was collected before."""
        from xdist import remote

        config = session.config
        config.workerinput, _, options, _ = self._channel.receive()  # type: ignore[attr-defined]
        _settle(config, options.get("basetemp"))
        config.pluginmanager.unregister(self)
        interactor = remote.interactor = remote.WorkerInteractor(config, self._channel)
        interactor.pytest_sessionstart(session)
        for report in self._reports:
            interactor.pytest_collectreport(report)
        interactor.pytest_collection_finish(session)
        return interactor.pytest_runtestloop(session)

    def end(self) -> None:
        """Ends the conversation of a fork, if this is one."""
        self._ended.set()
        if self._conversation.ident is not None:
            self._conversation.join()


def _settle(config: Any, temporary: str | None) -> None:
    """Gives a fork what is its own: its name and where its files are made."""
    told = config.workerinput
    os.environ["PYTEST_XDIST_TESTRUNUID"] = told["testrunuid"]
    os.environ["PYTEST_XDIST_WORKER"] = told["workerid"]
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(told["workercount"])
    for name in ONE_THREAD:
        os.environ.pop(name, None)
    sys.modules["__main__"] = ModuleType("__main__")  # what multiprocessing would import in each process it spawns
    config.option.basetemp = temporary
    if temporary is not None:
        config._tmp_path_factory._given_basetemp = Path(temporary)


here: Collected  # of this process


def main() -> None:
    """Collects what the command line names, and runs in each fork what xdist asks for."""
    global here
    fd, *arguments = sys.argv[1:]
    here = Collected(socket.socket(fileno=int(fd)))
    config: Any = _prepareconfig(arguments, [here])
    from xdist.remote import setup_config  # now, because pytest rewrites a plugin's assertions before its import

    setup_config(config, None)
    config.workerinput, config.workeroutput = ONE, {}
    try:
        status = config.hook.pytest_cmdline_main(config=config)
    except pytest.UsageError as error:
        sys.exit(f"ERROR: {error}")
    here.end()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(int(status))  # what was inherited isn't freed piece by piece


if __name__ == "__main__":
    from tests.parallel import collected  # the module that others import, not this one

    collected.main()
