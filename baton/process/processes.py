"""Processes and sessions: waiting for one, ending many, leaving none behind.

Knows nothing of what they run. Everything a cluster starts leads a session of its own, so a session id names a
process and all of its children. The one exception is an engine: it leads a session beside its I/O process's and the
kernel ends it with that process (``worker/engine_process.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # options of prctl(2), from linux/prctl.h
_LIBC = ctypes.CDLL(None)  # loaded now: a child between fork and exec must take no lock
KILL_S = 1.0  # a killed process is gone within this, unless the kernel holds it
KILL_ROUNDS = 5  # of a session that forks on


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Has the kernel send ``number`` to this process when the thread that started it ends; a ``preexec_fn``."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Makes descendants whose parents end children of this process, not of init; call ``reap_orphans`` now and
    then.
    """
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Iterable[int]) -> None:
    """Collects ended children, except for the pids ``own``, which are waited for elsewhere."""
    me = os.getpid()
    children = {int(pid) for task in Path("/proc/self/task").iterdir() for pid in _children_of(me, task.name)}
    for pid in children - set(own):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _children_of(pid: int, task: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    except OSError:
        return []


def wait_exit(pid: int, timeout_s: float) -> bool:
    """Waits up to ``timeout_s`` seconds for any process, child or not, to end; returns whether it has."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()  # select() refuses descriptors above 1,023
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(1000 * max(0.0, timeout_s)))
    finally:
        os.close(fd)


def session_members(session: int) -> list[int]:
    """Returns the pids of every living process of a session, without zombies."""
    entries = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(entry.name) for entry in entries if _session_of(entry) == session]


def named_in_session(name: str) -> int | None:
    """Returns the pid of a process in this process's session whose name in the kernel is ``name``; None if there is
    none.
    """
    for pid in session_members(os.getsid(0)):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    return None


def kill_session(session: int) -> None:
    """Sends SIGKILL to every process of a session, also to ones forked meanwhile, and waits for their end."""
    for _ in range(KILL_ROUNDS):
        members = session_members(session)
        if not members:
            return
        _signal_all(members, signal.SIGKILL)
        for pid in members:
            wait_exit(pid, KILL_S)


def end_sessions(leaders: Iterable[int], grace_s: float) -> None:
    """Sends SIGTERM to each session's leader; after ``grace_s`` seconds kills what is left of the sessions."""
    sessions = list(leaders)
    _signal_all(sessions, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for pid in sessions:
        wait_exit(pid, deadline - time.monotonic())
    for pid in sessions:
        kill_session(pid)


def _session_of(entry: Path) -> int | None:
    try:
        state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(session)


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
