"""Tests what a child's return code says, in words."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from baton.process.endings import OomKills, ending_of


@pytest.mark.parametrize(
    ("code", "before", "after", "says"),
    [
        (0, 0, 0, ("exit", "exit status 0")),
        (3, 0, 1, ("exit", "exit status 3")),
        (193, 0, 0, ("rank", "rank 1 of its engine is gone or stuck")),
        (-signal.SIGSEGV, 0, 1, ("signal", "SIGSEGV")),
        (-39, 0, 0, ("signal", "signal 39")),  # a real-time signal without a name
        (-signal.SIGKILL, 2, 2, ("signal", "SIGKILL")),
        (-signal.SIGKILL, 2, 3, ("oom", "SIGKILL: the kernel was out of memory for its control group")),
    ],
)
def test_an_ending_is_a_status_a_signal_or_want_of_memory(tmp_path: Path, code, before, after, says) -> None:
    events = tmp_path / "memory.events"
    events.write_text(f"low 0\noom 9\noom_kill {before}\noom_group_kill 7\n")
    memory = OomKills(events)
    events.write_text(f"low 0\noom 9\noom_kill {after}\noom_group_kill 7\n")
    assert ending_of(code, memory) == says


def test_without_a_control_group_nobody_was_out_of_memory(tmp_path: Path) -> None:
    assert ending_of(-signal.SIGKILL, OomKills(tmp_path / "none")).cause == "signal"
