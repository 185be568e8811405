"""Reads an adapter in a child process, so that steps wait neither for the interpreter's lock nor for files, and
damaged files can't harm the engine. Torch-free.

Knows nothing of loaded adapters. The child gets three memory files: the request, room for the matrices, its answer.
While it reads it has a lower priority than the engine (NICE), and limits of CPU time and memory. Starting takes a
third of a second of CPU, reading an adapter of 16 MB a tenth of it. So the next child is started, at that priority,
as soon as one has begun to read. A load that comes before it is up starts another, which may hurry.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from contextlib import suppress

import msgspec

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.reader import AdapterContent, read_adapter
from baton.engine.adapters.table import ReadAdapter, Reading
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterRefused, BatonError, ErrorInfo, Unavailable, from_info

NICE = 10  # while a child reads or is started ahead: a tenth of a core's share for a step that wants it as well
UP = b"\n"  # what a child writes before its answer once it is up: JSON takes it for space
LIMIT_S = 120.0  # seconds to read one adapter, because a file system that hangs must not keep others from loading


class ReadingAsk(msgspec.Struct, frozen=True):
    """A request to a child process: which adapter to read, and what it must fit."""

    source: AdapterPlace
    base: AdapterBase


class ReadingAnswer(msgspec.Struct, frozen=True):
    """A child's answer: what it read, or the error."""

    content: AdapterContent | None = None
    error: ErrorInfo | None = None


class ReadingChildren:
    """Starts child processes that read adapters for ``base``; after the first, one is always kept ready."""

    def __init__(self, base: AdapterBase) -> None:
        self._base = base
        self._ready: ChildReading | None = None

    def start(self, source: AdapterPlace) -> Reading:
        """Returns a child that has begun to read ``source``, or, if none could be started, a ``Reading`` whose
        result is the error.
        """
        try:
            found = self._waiting() or ChildReading()
        except OSError as error:
            return NoReading(f"adapter {source.path!r}: no process to read it: {error.strerror}")
        found.begin(source, self._base)
        with suppress(OSError):  # the next load starts its own, or says why it can't
            self._ready = ChildReading(NICE)
        return found

    def _waiting(self) -> ChildReading | None:
        """Returns the child that is ready, if there is one that is up and still runs."""
        found, self._ready = self._ready, None
        if found is not None and not (found.up and found.alive):
            found.close()
            return None
        return found

    def close(self) -> None:
        """Ends the child that is kept ready."""
        if self._ready is not None:
            self._ready.close()
            self._ready = None


class NoReading:
    """A ``Reading`` that could not begin, because the machine has no process or descriptor to spare."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def result(self) -> BatonError:
        """Returns an Unavailable error with the reason; trying again may help."""
        return Unavailable(self._problem, "lora_path")

    def close(self) -> None:
        """Does nothing, because nothing is open."""


class ChildReading:
    """A child process that reads one adapter, once ``begin`` names it. Close it after its result, or to end it.

    ``nice`` is its priority while it starts up, beside this process's; then it is NICE.
    """

    def __init__(self, nice: int = 0) -> None:
        self._files: list[int] = []
        try:
            for what in ("ask", "memory", "answer"):
                self._files.append(os.memfd_create(f"adapter-{what}"))
            self._process = self._started(nice)
        except OSError:
            self._close_files()
            raise
        self._path, self._until = "", float("inf")

    @property
    def alive(self) -> bool:
        """Returns whether the child still runs."""
        return self._process.poll() is None

    @property
    def up(self) -> bool:
        """Returns whether the child has started up, so that it reads at once when asked."""
        return os.fstat(self._files[2]).st_size > 0

    def _started(self, nice: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "baton.engine.adapters.reader_main", *map(str, self._files)]
        command.append(str(os.getpid()))
        made = subprocess.Popen(command, pass_fds=self._files, stdin=subprocess.PIPE)
        with suppress(ProcessLookupError):  # it has ended: ``result`` says so
            os.setpriority(os.PRIO_PROCESS, made.pid, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
        return made

    def begin(self, source: AdapterPlace, base: AdapterBase) -> None:
        """Makes the child read the adapter at ``source``."""
        self._path, self._until = source.path, time.monotonic() + LIMIT_S
        os.write(self._files[0], msgspec.json.encode(ReadingAsk(source, base)))
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: ``result`` says so
            self._process.stdin.close()

    def result(self) -> ReadAdapter | BatonError | None:
        """Returns the adapter or the error; None while it is being read. After LIMIT_S seconds it is an error."""
        status = self._process.poll()
        if status is None:
            late = time.monotonic() > self._until
            return self._failed(f"takes longer than {LIMIT_S:g} s to read") if late else None
        if status:
            return self._failed(f"ended its reader (status {status})")
        answer = msgspec.json.decode(_whole(self._files[2]), type=ReadingAnswer)
        if answer.error is not None:
            return from_info(answer.error)
        assert answer.content is not None
        return ReadAdapter(answer.content.info, PackedAdapter(answer.content.parts, mapped(self._files[1])))

    def close(self) -> None:
        """Ends the child if it still runs; the memory of the matrices stays mapped."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()  # not before: it would take that for the end of what it is asked
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []

    def _failed(self, how: str) -> AdapterRefused:
        return AdapterRefused(f"adapter {self._path!r} {how}", "lora_path")


def read_here(source: AdapterPlace, base: AdapterBase) -> ReadAdapter:
    """Reads an adapter in this process. Raises AdapterRefused and AdapterChanged."""
    content, memory = read_adapter(source, base, room)
    return ReadAdapter(content.info, PackedAdapter(content.parts, memory))


def room(size: int) -> memoryview:
    """Returns ``size`` bytes (at least 1) of new zeroed memory of this process, page-aligned."""
    return memoryview(mmap.mmap(-1, max(1, size)))


def mapped(file: int) -> memoryview:
    """Returns the bytes of memory file ``file``, mapped with all pages present, so that first uses don't fault."""
    return memoryview(mmap.mmap(file, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def _whole(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
