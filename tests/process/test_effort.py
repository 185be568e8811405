"""Tests how much the threads of another process get on, as the kernel counts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from baton.process.effort import Effort, efforts_of, gained

SPIN = "print(flush=True)\nwhile True: pass"
PARENT = f"import subprocess, sys, signal\nsubprocess.Popen([sys.executable, '-c', {SPIN!r}])\nsignal.pause()"


@contextmanager
def running(code: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def gains(pid: int, seconds: float) -> bool:
    """Returns whether the threads of ``pid`` gain ``seconds`` of effort within 30 s."""
    before, until = efforts_of(pid), time.monotonic() + 30
    while gained(before, efforts_of(pid)).total < seconds and time.monotonic() < until:
        time.sleep(0.01)
    return gained(before, efforts_of(pid)).total >= seconds


def rests(pid: int) -> bool:
    """Returns whether no thread of ``pid`` gets on in some time, soon."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        before = efforts_of(pid)
        time.sleep(0.1)
        if gained(before, efforts_of(pid)) == (0.0, 0.0):
            return True
    return False


def test_a_process_that_computes_gets_on_also_where_it_waits_for_a_core() -> None:
    with running(SPIN) as pid:
        assert gains(pid, 0.1)


def test_what_a_child_computes_counts() -> None:
    with running(PARENT) as pid:
        assert gains(pid, 0.1)


def test_a_process_that_is_stopped_gets_on_no_more() -> None:
    with running(SPIN) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert efforts_of(pid)
        assert rests(pid), "the kernel says so as it stops, and it may wait for a core with which to do so"


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    with running(SPIN) as pid:
        pass
    assert efforts_of(pid) == {}
    assert gained({}, {}) == (0.0, 0.0)


def test_of_several_threads_the_busiest_counts() -> None:
    before = {1: Effort(1.0, 1.0), 2: Effort(5.0, 0.0), 3: Effort(9.0, 9.0)}
    after = {1: Effort(1.5, 3.0), 2: Effort(6.0, 0.0), 4: Effort(70.0, 0.0)}
    found = gained(before, after)
    assert (found.computed, found.total) == (1.0, 2.5)
