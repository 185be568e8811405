"""Starts a cluster's processes as forks of one that has imported everything already: 0.1 s of CPU instead of 0.6.

A warm process imports what workers and routers import, and then forks whenever it is asked to: the child runs a
module as ``python -m`` does. It has one thread and has opened no gRPC, so its children begin like fresh ones. An
engine has to be its I/O process's child, so that one forks it before anything else and tells it later what to run.

Knows nothing of clusters. ``tests/launch`` and ``tests/e2e/test_serve.py`` start the same processes by exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import BinaryIO, NamedTuple

from baton.engine.load import QUIET_THREADS
from baton.launch.supervise import host_environment
from baton.process.processes import die_with_parent
from baton.worker.engine_process import EngineProcess
from baton.worker.spec import WorkerSpec

SERVED = ("baton.worker.host", "baton.worker.engine_main", "baton.router_host.main")
LIGHT = (*SERVED, "baton.engine.backends.paced.runner")
HEAVY = (*SERVED, "torch", "baton.engine.backends.native.runner", "baton.engine.backends.ranks.main")
HOSTS = ("baton.worker.host", "tests.e2e.watched_host")  # modules that start an engine
RANK = "baton.engine.backends.ranks.main"
MODULES = (*HOSTS, "baton.router_host.main", RANK)
MOST_BYTES = 1 << 18  # of one request, most of it the environment
THREADS = dict([QUIET_THREADS, ("OPENBLAS_NUM_THREADS", "1")])
"""What libraries read as they are imported, so that threads of engines don't spin and numpy starts none."""
MOST_PASSED = 16  # descriptors of one request
HELD_AT = 512  # where a child holds descriptors, until it has closed those of others
MOST_FDS = 1024  # that a child closes, beyond its standard ones


class Forked:
    """Is a child of this process by fork, with what ``subprocess.Popen`` offers of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fd = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._fd)

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code once it has ended. Raises TimeoutExpired."""
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._end_fd(), select.POLLIN)
            if not poller.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._status())
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, sig)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _end_fd(self) -> int:
        return self._fd

    def _status(self) -> int:
        return os.waitpid(self.pid, 0)[1]


class ForkedElsewhere(Forked):
    """Is a child of a warm process, which says over ``connection`` how it ended."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        super().__init__(pid)
        self._connection = connection

    def _end_fd(self) -> int:
        return self._connection.fileno()

    def _status(self) -> int:
        return int(self._connection.recv(64) or signal.SIGKILL)


# ---- who asks --------------------------------------------------------------------------------------------------


@cache
def warm(preload: tuple[str, ...]) -> Warm:
    """Returns the warm process that has imported ``preload``: the shared one, or one that the first call starts."""
    name = os.environ.get(_variable(preload))
    return Warm(bytes.fromhex(name)) if name else Warm.started(preload)


def of(device: str) -> Warm:
    """Returns the warm process for clusters on ``device``; paced engines have no torch."""
    return warm(LIGHT if device.startswith("paced:") else HEAVY)


def share() -> None:
    """Starts the warm processes that clusters need; the processes that this one starts from now on use these."""
    for preload in (HEAVY, LIGHT):
        os.environ[_variable(preload)] = warm(preload).name.hex()


def _variable(preload: tuple[str, ...]) -> str:
    return "BATON_TEST_WARM_" + ("HEAVY" if preload == HEAVY else "LIGHT")


class Warm:
    """Is a warm process, which listens at the abstract unix address ``name``; it ends with who started it."""

    def __init__(self, name: bytes, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name, self._process = name, process

    @classmethod
    def started(cls, preload: Sequence[str], module: Sequence[str] = ("tests.warm",)) -> Warm:
        """Returns a new one that runs ``module`` and imports ``preload``; whoever asks it meanwhile waits."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")  # a name that the kernel chooses, in no folder
        listener.listen()
        fd = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", *module, str(fd), *preload],
            pass_fds=[fd], stdin=subprocess.PIPE, env=host_environment() | THREADS,
        )  # fmt: skip
        with listener:
            return cls(listener.getsockname(), process)

    def end(self) -> None:
        """Ends the process, if this one started it; its children live on."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def start(
        self, command: Sequence[str], log: BinaryIO, session: bool = True, fds: Sequence[int] = ()
    ) -> Forked | None:
        """Runs ``python -m MODULE …`` with its output in ``log``, as leader of a session or to die with us. It gets
        the descriptors ``fds`` under their numbers.

        Returns None where the command isn't that of a module that it knows.
        """
        if command[0] != sys.executable or command[1] != "-m" or command[2] not in MODULES:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.name)
        request = [list(command[2:]), host_environment(), os.getcwd(), session, list(fds)]
        socket.send_fds(connection, [json.dumps(request).encode()], [log.fileno(), *fds])
        return ForkedElsewhere(int(connection.recv(64)), connection)


# ---- the warm process ------------------------------------------------------------------------------------------


Ends = dict[int, tuple[int, socket.socket]]  # by pidfd: a child's pid and who wants to know how it ends


class Request(NamedTuple):
    """Describes a child: a module with its arguments, its environment and folder, and where its output goes."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    session: bool
    numbers: list[int]
    fds: list[int]  # of the log, and those that come under ``numbers``


def serve(listener: socket.socket) -> Request:
    """Forks for whoever asks, until nobody may any more; returns in each child, with what it is to be."""
    ends: Ends = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    sys.exit(0)  # who started us is gone
                if key.fileobj is not listener:
                    selector.unregister(key.fd)
                    _tell_end(*ends.pop(key.fd))
                    os.close(key.fd)
                    continue
                connection, _ = listener.accept()
                data, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_PASSED)
                if (pid := os.fork()) == 0:
                    _close((listener, connection), ends)
                    return Request(*json.loads(data), fds)
                for fd in fds:
                    os.close(fd)
                ends[fd := os.pidfd_open(pid)] = pid, connection
                selector.register(fd, selectors.EVENT_READ)
                connection.send(str(pid).encode())


def _close(sockets: tuple[socket.socket, ...], ends: Ends) -> None:
    """Closes in a child what is its parent's."""
    for fd, (_, connection) in ends.items():
        os.close(fd)
        connection.close()
    for one in sockets:
        one.close()


def _tell_end(pid: int, connection: socket.socket) -> None:
    status = os.waitpid(pid, 0)[1]
    with connection, contextlib.suppress(OSError):  # nobody may be there any more
        connection.send(str(status).encode())


def become(request: Request) -> None:
    """Makes this fork what was asked for, and runs it."""
    if request.session:
        os.setsid()
    else:
        die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log, *passed = request.fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, HELD_AT) for fd in passed]
    os.closerange(3, HELD_AT)
    os.closerange(max(held, default=HELD_AT - 1) + 1, MOST_FDS)
    for number, fd in zip(request.numbers, held, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if request.arguments[0] in HOSTS:
        reserve_engine()
    if request.arguments[0] == RANK:
        end_with_lead(request.arguments)
    run(request.arguments)


def end_with_lead(arguments: list[str]) -> None:
    """Ends this rank when the process that it is for does, as the kernel would if that were its parent."""
    parent = arguments.index("--parent") + 1
    lead = os.pidfd_open(int(arguments[parent]))
    arguments[parent] = str(os.getppid())

    def watch() -> None:
        select.select([lead], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def spawn_rank(command: Sequence[str], fds: Sequence[int]) -> Forked:
    """Starts a rank in place of ``Follower.spawn``; its output is ours."""
    started = warm(HEAVY).start(command, sys.stderr.buffer, session=False, fds=fds)
    assert started is not None
    return started


def run(arguments: list[str]) -> None:
    """Runs a module with arguments, as ``python -m`` does."""
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def reserve_engine() -> None:
    """Forks this I/O process's engine, which waits until ``EngineProcess.spawn`` says what it is to run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    io_process, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        run(await_orders(theirs, io_process))
        sys.exit(0)
    theirs.close()

    def spawn(spec: WorkerSpec, fd: int) -> Forked:
        _, _, *arguments = EngineProcess.command(spec, fd)
        socket.send_fds(ours, [json.dumps([fd, arguments]).encode()], [fd])
        return Forked(pid)

    EngineProcess.spawn = staticmethod(spawn)  # type: ignore[method-assign, assignment]


def await_orders(orders: socket.socket, io_process: int) -> list[str]:
    """Returns what the engine is to run, with its end of the channel open under the number that it expects."""
    os.setsid()
    die_with_parent(signal.SIGKILL)
    data, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, 1)
    orders.close()
    if not data or os.getppid() != io_process:
        os._exit(0)
    number, arguments = json.loads(data)
    if fds[0] != number:
        os.dup2(fds[0], number)
        os.close(fds[0])
    return arguments


def main() -> None:
    """Imports what the command line names and serves on the inherited socket."""
    fd, *preload = sys.argv[1:]
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in each child"
    become(serve(socket.socket(fileno=int(fd))))


if __name__ == "__main__":
    main()
