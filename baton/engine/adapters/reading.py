"""Reads adapters in processes of their own, so that steps wait neither for the interpreter's lock nor for files,
and damaged files can't harm the engine. Torch-free.

Knows nothing of loaded adapters. One process (``reader_main.py``) is started with the engine, before there are
steps, and forks a child per adapter, because starting an interpreter takes several times the CPU time that reading
an adapter of 16 MB does. A child has a low priority, paces itself (``pace.py``) and has limits of CPU time and
memory. It leaves the packed matrices in a memory file; the engine only maps that, and the process frees it later.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import sys
import time
import weakref
from contextlib import suppress

import msgspec
import numpy as np

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.part_table import PART_ROW, PartTable
from baton.engine.adapters.reader import read_adapter
from baton.engine.adapters.table import ReadAdapter, Reading
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterRefused, BatonError, ErrorInfo, Unavailable, from_info
from baton.protos.nouns import AdapterInfo

log = logging.getLogger("baton.engine")

NICE = 10  # of a child, and of what forks it once it is up
LIMIT_S = 120.0  # seconds to read one adapter, because a file system that hangs must not keep others from loading
STATUS_BYTES = 16  # more than a child's status has digits
FREE = b"free"  # beside a descriptor: the reader closes it, which frees the memory and takes 2 ms per 16 MB


class ReadingAnswer(msgspec.Struct, frozen=True):
    """A child's answer: what it read, or the error. The memory file has the matrices and, behind them, the rows of
    the adapter's parts.
    """

    info: AdapterInfo | None = None
    error: ErrorInfo | None = None


class AdapterReader:
    """Reads adapters for ``base``, one at a time, through a process that forks; starts that again if it ended."""

    def __init__(self, base: AdapterBase) -> None:
        self._base = base
        self._server: ReadServer | None = None

    def warm(self) -> None:
        """Starts the process, so that the first load finds it up. A machine that has none to spare says so then."""
        with suppress(OSError):
            self._server = ReadServer(self._base)

    def start(self, source: AdapterPlace) -> Reading:
        """Returns a child that has begun to read ``source``, or, if none could be started, a ``Reading`` whose
        result is the error.
        """
        try:
            return ForkedReading(self._running(), source)
        except OSError as error:
            return NoReading(f"adapter {source.path!r}: no process to read it: {error.strerror}")

    def close(self) -> None:
        """Ends the process and what it forked."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def _running(self) -> ReadServer:
        if self._server is None or not self._server.alive:
            if self._server is not None:
                log.warning("the process that reads adapters ended; it is started again")
                self._server.end()
            self._server = ReadServer(self._base, NICE)
        return self._server


class ReadServer:
    """The process that forks a child per adapter. Raises OSError if it can't be started.

    ``nice`` is its priority while it starts up, beside this process's; then it is NICE.
    """

    def __init__(self, base: AdapterBase, nice: int = 0) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = os.memfd_create("adapter-base")
        try:
            os.write(asked, msgspec.json.encode(base))
            fds = [theirs.fileno(), asked]
            command = [sys.executable, "-m", "baton.engine.adapters.reader_main", *map(str, fds), str(os.getpid())]
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # because a process with threads shouldn't fork
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=env)
        except OSError:
            self.socket.close()
            raise
        finally:
            theirs.close()
            os.close(asked)
        self.pid = self._process.pid
        self.socket.setblocking(False)
        with suppress(ProcessLookupError):  # it has ended: ``alive`` says so
            os.setpriority(os.PRIO_PROCESS, self.pid, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))

    @property
    def alive(self) -> bool:
        """Returns whether the process still runs and takes adapters to read."""
        return self.socket.fileno() >= 0 and self._process.poll() is None

    def mapped(self, file: int) -> tuple[memoryview, int]:
        """Returns the bytes of memory file ``file``, and a descriptor of it that is open as long as these are
        there. Pages are mapped as they are first used, 16 at a time, which takes half of what mapping them at once
        does.
        """
        memory, kept = mmap.mmap(file, 0), os.dup(file)
        weakref.finalize(memory, self._free, kept).atexit = False
        return memoryview(memory), kept

    def _free(self, file: int) -> None:
        """Leaves it to the process to free the memory, once this one has unmapped it."""
        with suppress(OSError):  # it has ended: closing frees it here
            socket.send_fds(self.socket, [FREE], [file])
        os.close(file)

    def end(self) -> None:
        """Kills the process, if it runs; the kernel ends its child with it. Doesn't wait for the child, which may
        hang in a file system.
        """
        self.socket.close()
        self._process.kill()
        self._process.wait()


class NoReading:
    """A ``Reading`` that could not begin, because the machine has no process or descriptor to spare."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def result(self) -> BatonError:
        """Returns an Unavailable error with the reason; trying again may help."""
        return Unavailable(self._problem, "lora_path")

    def close(self) -> None:
        """Does nothing, because nothing is open."""


class ForkedReading:
    """The reading of ``source`` by a child of ``server``. Close it after its result, or to end it. Raises
    OSError.
    """

    def __init__(self, server: ReadServer, source: AdapterPlace) -> None:
        self._server, self._path, self._until = server, source.path, time.monotonic() + LIMIT_S
        self._ended = False
        self._files: list[int] = []
        try:
            for what in ("memory", "answer"):
                self._files.append(os.memfd_create(f"adapter-{what}"))
            socket.send_fds(server.socket, [msgspec.json.encode(source)], self._files)
        except OSError:
            self._close_files()
            raise

    def result(self) -> ReadAdapter | BatonError | None:
        """Returns the adapter or the error; None while it is being read. After LIMIT_S seconds it is an error."""
        try:
            status = self._server.socket.recv(STATUS_BYTES)
        except BlockingIOError:
            late = time.monotonic() > self._until
            return self._failed(f"takes longer than {LIMIT_S:g} s to read") if late else None
        except OSError:
            status = b""
        if not status:
            return Unavailable(
                f"adapter {self._path!r}: the process that read it ended; load it again", "lora_path"
            )
        self._ended = True
        if status != b"0":
            return self._failed(f"ended its reader (status {status.decode()})")
        answer = msgspec.json.decode(_whole(self._files[1]), type=ReadingAnswer)
        if answer.error is not None:
            return from_info(answer.error)
        assert answer.info is not None
        return ReadAdapter(answer.info, packed_in(*self._server.mapped(self._files[0]), answer.info.bytes))

    def close(self) -> None:
        """Ends the child if it still reads; the memory of the matrices stays mapped."""
        if not self._ended:
            self._server.end()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []

    def _failed(self, how: str) -> AdapterRefused:
        return AdapterRefused(f"adapter {self._path!r} {how}", "lora_path")


def append(memory: int, matrices: int, parts: PartTable) -> None:
    """Writes the rows of ``parts`` to memory file ``memory`` behind the ``matrices`` bytes of matrices."""
    with open(memory, "r+b", closefd=False) as file:
        file.seek(matrices)
        file.write(parts.rows.tobytes())


def packed_in(memory: memoryview, file: int, matrices: int) -> PackedAdapter:
    """Returns the adapter in ``memory``, that of ``file``: ``matrices`` bytes of matrices, and behind them what
    ``append`` wrote.
    """
    return PackedAdapter(PartTable(np.frombuffer(memory[matrices:], PART_ROW)), memory[:matrices], file)


def read_here(source: AdapterPlace, base: AdapterBase) -> ReadAdapter:
    """Reads an adapter in this process. Raises AdapterRefused and AdapterChanged."""
    content, memory = read_adapter(source, base, lambda size, tensors: room(size))
    return ReadAdapter(content.info, PackedAdapter(content.parts, memory))


def room(size: int) -> memoryview:
    """Returns ``size`` bytes (at least 1) of new zeroed memory of this process, page-aligned."""
    return memoryview(mmap.mmap(-1, max(1, size)))


def _whole(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
