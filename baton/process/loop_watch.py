"""Detects an event loop that stands still: logs a warning with the stack of the code, and counts it.

Knows nothing of what runs on the loop. The loop beats on a timer; a thread checks that it does, and samples the
stack of the loop's thread while it doesn't. What counts is this process's own work: CPU seconds of one callback, or
of other threads while the loop waited for the interpreter's lock. A busy machine, which lets nobody run, is no
stall; nor is a row of short callbacks. Code in C may hold the lock, so that the watching thread can't sample; it
then finds two of its samples far apart although it waited for no core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Self

import msgspec

LOOKS = 5  # looks in the time that counts as a stall, so that its stack is seen
KEPT = 32  # stalls that are remembered
MOST_LOOKS = 1000  # samples of one stall, because each holds a stack
STOOD_STILL = "the event loop stood still"
FRAMES = 12  # innermost ones of a stack
log = logging.getLogger("baton.loop")


def watching(
    stall_s: float, notice: Callable[[float], object] = lambda seconds: None
) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager that watches the running loop for stalls of ``stall_s`` seconds or more; 0 watches
    nothing.

    ``notice`` is called with the seconds of each stall.
    """
    return LoopWatch(stall_s, notice) if stall_s else contextlib.nullcontext()


class Stall(msgspec.Struct, frozen=True):
    """Describes a stall of the loop: the seconds of this process's own work, and the stack of the loop's thread."""

    seconds: float
    stack: str


class _Sample(msgspec.Struct, frozen=True):
    """A look at a loop that doesn't beat: CPU seconds of its thread, the frame of its callback, the stack."""

    seconds: float
    root: FrameType | None
    stack: str


class _Used(msgspec.Struct, frozen=True):
    """Seconds: by the wall, CPU of all threads but the watch's own, CPU of the loop's, those that it waited for a
    core.
    """

    wall: float
    process: float
    own: float
    delayed: float


class LoopWatch:
    """Watches the event loop of the thread that enters it; ``stalls`` holds the last KEPT, the newest last.

    ``notice`` is called with the seconds of each stall of ``stall_s`` or more.
    """

    def __init__(self, stall_s: float, notice: Callable[[float], object] = lambda seconds: None) -> None:
        self.stalls: deque[Stall] = deque(maxlen=KEPT)
        self._stall_s, self._notice = stall_s, notice
        self._every = stall_s / LOOKS
        self._beats, self._ended = 0, threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._watch_clock_id: int | None = None
        self._last: _Used | None = None

    def __enter__(self) -> Self:
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        self._delay = _Delay()
        self._clock_id = time.pthread_getcpuclockid(self._ident)
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()
        self._watch_clock_id = time.pthread_getcpuclockid(self._thread.ident or 0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()
        self._delay.close()

    def _beat(self) -> None:
        self._beats += 1
        before, self._last = self._last, self._used()
        self._timer = self._loop.call_later(self._every, self._beat)
        if before is not None:
            self._judge_wait(before, self._last)

    def _judge_wait(self, before: _Used, now: _Used) -> None:
        """Reports if other threads kept the loop from running since the last beat."""
        own, others = now.own - before.own, now.process - before.process - (now.own - before.own)
        waited = now.wall - before.wall - own - (now.delayed - before.delayed) - self._every
        if min(waited, others) >= self._stall_s:
            stacks = [_stack(f) for ident, f in sys._current_frames().items() if ident != self._ident]
            self._tell(Stall(min(waited, others), "another thread, one of:\n" + "\n".join(stacks)))

    def _watch(self) -> None:
        beats, samples = -1, list[_Sample]()
        delay, used, delayed = _Delay(), time.clock_gettime(self._clock_id), 0.0
        while not self._ended.wait(self._every):
            frame = sys._current_frames().get(self._ident)
            now, late = time.clock_gettime(self._clock_id), delay.seconds()
            if now - used - (late - delayed) >= self._stall_s:
                self._tell(Stall(now - used, _stack(frame)))
                samples.clear()
            if self._beats != beats:
                self._judge(samples)
                beats, samples = self._beats, []
            elif len(samples) < MOST_LOOKS:
                samples.append(_Sample(now, _root(frame), _stack(frame)))
            del frame  # it keeps its callback's locals
            # Anew, because a look reads files and waits for the interpreter's lock each time, while callbacks run.
            delayed, used = delay.seconds(), time.clock_gettime(self._clock_id)
        self._judge(samples)
        delay.close()

    def _used(self) -> _Used:
        own = time.clock_gettime(self._clock_id)
        looks = 0.0 if self._watch_clock_id is None else time.clock_gettime(self._watch_clock_id)
        return _Used(time.monotonic(), time.process_time() - looks, own, self._delay.seconds())

    def _judge(self, samples: list[_Sample]) -> None:
        """The longest hold of one callback among ``samples``, which lie between two beats."""
        longest: Stall | None = None
        first = 0
        for at, sample in enumerate(samples):
            if sample.root is not samples[first].root:
                first = at
            seconds = sample.seconds - samples[first].seconds
            if seconds >= self._stall_s and (longest is None or seconds > longest.seconds):
                longest = Stall(seconds, samples[(first + at) // 2].stack)
        if longest is not None:
            self._tell(longest)

    def _tell(self, stall: Stall) -> None:
        self.stalls.append(stall)
        self._notice(stall.seconds)
        log.warning("%s for %.0f ms in\n%s", STOOD_STILL, stall.seconds * 1000, stall.stack)


class _Delay:
    """Seconds that the thread which makes this waited for a core, by the kernel; 0 where it doesn't say.

    Its file stays open: a process may run out of descriptors.
    """

    def __init__(self) -> None:
        try:
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Returns the seconds that the thread was delayed so far."""
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0

    def close(self) -> None:
        """Closes the file that is read; call it once the thread is watched no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _stack(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame, FRAMES)) if frame else ""


def _root(frame: FrameType | None) -> FrameType | None:
    """Returns the outermost frame above the loop's own, which stands for the callback that runs."""
    found = frame
    while frame is not None:
        if frame.f_code.co_filename.endswith(_LOOPS):
            break
        found, frame = frame, frame.f_back
    return found


_LOOPS = ("asyncio/events.py", "asyncio/runners.py", "uvloop/__init__.py")
