"""Slots on one machine: a worker process holds its slot's file lock for as long as it lives, whoever started it.

Knows nothing of Ray, gRPC or engines. ``<slot>.lock`` is held with flock by the worker (and holds its pid),
``<slot>.json`` describes its state. A supervisor that finds the lock taken adopts the survivor or ends it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import msgspec

from baton.protos.errors import ErrorInfo

CLOSED = "closed"
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))  # a disk, or what of it is ours
PID_CHARS = 32  # characters of the file that hold the owner's process id, padded so that one write replaces it
NAMED_S = 0.1  # a host that has the lock writes its pid within this


class SlotRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds what a worker process records of itself.

    ``state`` is "starting", "ready", or "failed" because of ``error``.
    """

    slot: str
    pid: int
    state: str = "starting"
    incarnation: str = ""
    address: str = ""
    engine_pid: int = 0
    metrics_address: str = ""
    error: ErrorInfo | None = None
    role: str = ""  # what it plays now


class WorkerSlot:
    """One slot in directory ``folder``. A worker calls ``acquire`` and ``write``; supervisors only read."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.name = name
        self._folder = Path(folder)
        self._lock = self._folder / f"{name}.lock"
        self._record = self._folder / f"{name}.json"
        self._fd: int | None = None

    def acquire(self, patience_s: float = 0.5) -> bool:
        """Takes the slot for this process's life (children don't inherit it); returns False if it stays taken for
        ``patience_s`` seconds.

        It retries because a reader's ``holder`` locks the file for a moment.
        """
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock_within(fd, patience_s):
            os.close(fd)
            return False
        os.pwrite(fd, f"{os.getpid():<{PID_CHARS}}".encode(), 0)  # one write: the lock is never held by nobody
        self._fd = fd
        return True

    def release(self) -> None:
        """Gives the slot back; the kernel does so when the process dies."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def holder(self) -> int | None:
        """Returns the pid of the process that holds the slot now; None if none does."""
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _holder_of(fd)
        finally:
            os.close(fd)

    def write(self, record: SlotRecord) -> None:
        """Writes the worker's record, atomically unless the disk is full. The directory must exist.

        Raises OSError.
        """
        draft, data = self._record.with_suffix(f".{os.getpid()}.tmp"), msgspec.json.encode(record)
        try:
            draft.write_bytes(data)
            draft.replace(self._record)
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno not in FULL or not self._record.exists():
                raise
            self._overwrite(data)

    def _overwrite(self, data: bytes) -> None:
        """Writes ``data`` in the place that the present record has on the disk; whoever reads half of it finds none
        at that moment.
        """
        with self._record.open("r+b") as file:
            file.write(data)
            file.truncate()

    def read(self) -> SlotRecord | None:
        """Returns the last record, even of a worker that has ended; None if there is none."""
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=SlotRecord)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def current(self, pid: int) -> SlotRecord | None:
        """Returns the record that process ``pid`` wrote; None if it wrote none."""
        record = self.read()
        return record if record is not None and record.pid == pid else None


def _lock_within(fd: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True


def _holder_of(fd: int) -> int | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named_within(fd, NAMED_S)
    return None


def _named_within(fd: int, patience_s: float) -> int | None:
    """The living process that the file names. Just after a lock changed hands it may still name the dead one."""
    deadline = time.monotonic() + patience_s
    while True:
        text = os.pread(fd, PID_CHARS, 0).strip()
        if text.isdigit() and Path("/proc", text.decode()).exists():
            return int(text)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def close_slots(folder: str | Path) -> None:
    """Marks the slots in ``folder`` as closed: supervisors start no worker there any more."""
    Path(folder, CLOSED).touch()


def slots_closed(folder: str | Path) -> bool:
    """Returns whether the slots in ``folder`` are closed, or the directory is gone."""
    return Path(folder, CLOSED).exists() or not Path(folder).is_dir()


def holders(folder: str | Path) -> dict[str, int]:
    """Returns the pid of each slot in ``folder`` that is held now, by the slot's name."""
    found = {lock.stem: WorkerSlot(folder, lock.stem).holder() for lock in Path(folder).glob("*.lock")}
    return {name: pid for name, pid in found.items() if pid is not None}
