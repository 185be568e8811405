"""Keeps one slot's worker host running: starts it, adopts a running one, restarts it when it dies.

Knows nothing of Ray, nor of what a host does. A host is a process in a session of its own, so that it outlives its
supervisor; the slot's lock, not the supervisor's memory, says whether one is running.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from baton.cluster.departures import Departure, note_blocking
from baton.process.children import BACKOFF_S, HEALTHY_S, child_environment
from baton.process.endings import Ending, OomKills, ending_of
from baton.process.processes import end_sessions, kill_session, wait_exit
from baton.protos.errors import ConfigError, ErrorInfo
from baton.tls.identity import TlsFiles
from baton.worker.slots import SlotRecord, WorkerSlot, slots_closed
from baton.worker.spec import load_spec

FIRST_TRIES = 3  # a host that was never ready is not started more often than this
GRACE_S = 2.0  # seconds between SIGTERM and SIGKILL
HOST = (sys.executable, "-m", "baton.worker.host")


class HostPlan(msgspec.Struct, frozen=True):
    """Describes what runs in a slot. ``spec`` is a WorkerSpec as JSON, passed to the host in a file, as it may hold
    a password.

    ``spec`` "" passes no file. ``command`` empty runs Baton's worker host.
    """

    slot: str
    role: str
    spec: str
    folder: str  # of the slots' records and locks
    log: str  # path of the host's log
    command: tuple[str, ...] = ()
    resources: dict[str, float] = {}  # Ray resources per bundle; empty: one baton_<role>
    labels: dict[str, str] = {}  # labels that the node must carry
    gang: int = 1  # bundles of these resources on each node
    cards: int = 1  # GPUs of a worker that runs on some, one per rank
    hosts: int = 1  # nodes of the worker: its own, and further ones that have ranks of it
    rank_key_file: str = ""  # with the key that these nodes share; empty: loopback or TLS only
    rank_tls: TlsFiles | None = None  # by which these nodes encrypt, at the same paths on each; None: plaintext


class SlotStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes a slot as its supervisor sees it; ``state`` is SlotRecord's, or "restarting", "failed", "ended",
    "waiting".
    """

    slot: str
    state: str
    pid: int = 0
    address: str = ""
    restarts: int = 0  # by this supervisor
    adopted: bool = False  # the host was started by an earlier supervisor
    error: ErrorInfo | None = None
    role: str = ""  # that the worker has now


class HostProcess(Protocol):
    """Interface of a process that a supervisor started."""

    @property
    def pid(self) -> int:
        """Returns the process id, which is also its session's id."""

    def wait(self) -> int:
        """Waits for the process to end and returns its exit code, negative for a signal."""


StartHost = Callable[[list[str], BinaryIO], HostProcess]
"""Starts a command with its output in a file, as leader of a session of its own."""


def start_host(command: list[str], log: BinaryIO) -> HostProcess:
    """Starts a worker host's command in a new session with its output in ``log``; returns the process."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=host_environment(), start_new_session=True
    )


class HostSupervisor:
    """Keeps the host of one slot running, on a thread, from ``start`` to ``stop``.

    ``start`` is called with a command and a log file, and returns the process.
    """

    def __init__(self, plan: HostPlan, start: StartHost = start_host) -> None:
        self._plan = plan
        self._start = start
        self._slot = WorkerSlot(plan.folder, plan.slot)
        self._spec = Path(plan.folder, f"{plan.slot}.spec")
        self._stopping = threading.Event()
        self._status = SlotStatus(plan.slot, "starting")
        self._thread = threading.Thread(target=self._run, name=plan.slot, daemon=True)
        self._children: dict[int, HostProcess] = {}
        self._was_ready = self._slot.read() is not None  # by an earlier supervisor's care
        self._deaths = 0
        self._restarts = 0
        self._memory = OomKills()

    def start(self) -> None:
        """Creates the slot's folders, writes the worker's spec, and starts the supervising thread."""
        for folder in (Path(self._plan.folder), Path(self._plan.log).parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # on another node than the one that planned
        self._spec.write_text(self._plan.spec)
        self._thread.start()

    def status(self) -> SlotStatus:
        """Returns the slot's current status."""
        return self._status

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Ends the host for good: SIGTERM, then SIGKILL after ``grace_s`` seconds."""
        self._stopping.set()
        pid = self._slot.holder() or self._status.pid
        end_sessions([pid] if pid else [], grace_s)
        self._thread.join(grace_s)

    def _run(self) -> None:
        while not self._over() and self._status.state != "failed":
            try:
                self._one_life()
            except OSError as error:  # no process, descriptor or memory to be had: it is tried again like a death
                self._died(0, str(error))
            if not self._over() and self._status.state != "failed":
                self._stopping.wait(BACKOFF_S[min(self._deaths, len(BACKOFF_S)) - 1])
                self._restarts += 1
        if self._status.state != "failed":
            self._status = SlotStatus(self._plan.slot, "ended", restarts=self._restarts)

    def _one_life(self) -> None:
        pid = self._slot.holder()
        adopted = pid is not None
        self._watch(pid if pid is not None else self._spawn(), adopted)

    def _over(self) -> bool:
        return self._stopping.is_set() or slots_closed(self._plan.folder)

    def _spawn(self) -> int:
        handed_over = ("--spec", str(self._spec)) if self._plan.spec else ()
        with open(self._plan.log, "ab") as log:
            child = self._start([*(self._plan.command or HOST), *handed_over], log)
        self._children[child.pid], self._memory = child, OomKills()
        return child.pid

    def _watch(self, pid: int, adopted: bool) -> None:
        """Follow the host until it is gone, then say how it went."""
        ready_since: float | None = None
        self._status = self._seen(pid, None, adopted)
        if self._stopping.is_set():  # told so while it was started: ``stop`` may not have seen it
            kill_session(pid)
        while not wait_exit(pid, 0.1):
            record = self._slot.current(pid)
            if record is not None and record.state == "ready" and ready_since is None:
                ready_since = time.monotonic()
            self._status = self._seen(pid, record, adopted)
        self._reap(pid)
        self._was_ready = self._was_ready or ready_since is not None
        healthy = ready_since is not None and time.monotonic() - ready_since > HEALTHY_S
        self._deaths = 0 if healthy else self._deaths
        self._died(pid)

    def _died(self, pid: int, why: str = "") -> None:
        self._deaths += 1
        self._status = self._after(pid, why)

    def _seen(self, pid: int, record: SlotRecord | None, adopted: bool) -> SlotStatus:
        state, address = (record.state, record.address) if record else ("starting", "")
        error = record.error if record else None
        role = record.role if record else ""
        return SlotStatus(self._plan.slot, state, pid, address, self._restarts, adopted, error, role)

    def _after(self, pid: int, why: str) -> SlotStatus:
        record = self._slot.current(pid)
        error = record.error if record else None
        if not self._was_ready and (error or self._deaths >= FIRST_TRIES):
            why = why or self._log_tail()
            error = error or ErrorInfo("StartupError", f"{self._plan.slot} does not start: {why}")
            return SlotStatus(self._plan.slot, "failed", restarts=self._restarts, error=error)
        return SlotStatus(self._plan.slot, "restarting", restarts=self._restarts, error=error)

    def _reap(self, pid: int) -> None:
        child = self._children.pop(pid, None)
        if child is not None:
            ending, now = ending_of(child.wait(), self._memory), time.strftime("%F %T")
            with open(self._plan.log, "a") as log:
                log.write(f"{now} {self._plan.slot}: process {pid} ended with {ending.detail}\n")
            self._tell(pid, ending)

    def _tell(self, pid: int, ending: Ending) -> None:
        """Reports to Redis what a worker died of, if it had served and didn't report it itself."""
        record = self._slot.current(pid)
        if record is None or not record.address or not self._plan.spec or self._over():
            return
        try:
            spec = load_spec(self._plan.spec)
        except ConfigError:
            return  # of a command that isn't a worker host
        if spec.member.redis_url:
            gone = Departure(record.slot, record.incarnation, record.role, *ending, time.time())
            note_blocking(spec.member.redis_url, spec.member.namespace, gone)

    def _log_tail(self, size: int = 600) -> str:
        text = Path(self._plan.log).read_text(errors="replace")[-size:].strip()
        return f"{text or 'it printed nothing'} (log: {self._plan.log})"


def host_environment() -> dict[str, str]:
    """Returns a worker host's environment: this process's, without Ray's variables and OMP_NUM_THREADS.

    Baton's package is importable in it.
    """
    inherited = child_environment()
    return {k: v for k, v in inherited.items() if not k.startswith("RAY_") and k != "OMP_NUM_THREADS"}
