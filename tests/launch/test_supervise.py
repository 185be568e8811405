import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.launch.supervise import HostPlan, HostSupervisor, SlotStatus, host_environment
from baton.process.processes import session_members, wait_exit
from baton.worker.slots import close_slots

Plan = Callable[..., HostPlan]


@pytest.fixture
def supervise() -> Iterator[Callable[[HostPlan], HostSupervisor]]:
    started = []

    def start(plan: HostPlan) -> HostSupervisor:
        started.append(HostSupervisor(plan))
        started[-1].start()
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.stop(0.2)


def until(supervisor: HostSupervisor, state: str, timeout_s: float = 90, other_than: int = -1) -> SlotStatus:
    deadline = time.monotonic() + timeout_s
    while (status := supervisor.status()).state != state or status.pid == other_than:
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def test_a_killed_host_is_started_again(plan: Plan, supervise: Callable[[HostPlan], HostSupervisor]) -> None:
    supervisor = supervise(plan())
    first = until(supervisor, "ready")
    os.kill(first.pid, signal.SIGKILL)
    second = until(supervisor, "ready", other_than=first.pid)
    assert second.restarts == 1


def test_a_second_supervisor_adopts_the_survivor(
    plan: Plan, supervise: Callable[[HostPlan], HostSupervisor]
) -> None:
    first = until(supervise(plan()), "ready")
    adopted = until(supervise(plan()), "ready")
    assert adopted.pid == first.pid
    assert adopted.adopted


def test_stopping_leaves_no_process(plan: Plan, supervise: Callable[[HostPlan], HostSupervisor]) -> None:
    supervisor = supervise(plan())
    pid = until(supervisor, "ready").pid
    assert len(session_members(pid)) == 2
    supervisor.stop(1.0)
    assert session_members(pid) == []
    assert supervisor.status().state == "ended"


def test_a_host_that_refuses_is_not_tried_again(
    plan: Plan, supervise: Callable[[HostPlan], HostSupervisor]
) -> None:
    status = until(supervise(plan(mode="refuse")), "failed")
    assert status.error is not None
    assert (status.error.type, status.error.message) == ("CheckpointError", "no such file: weights")
    assert status.restarts == 0


def test_a_host_that_only_crashes_fails_with_its_last_words(
    plan: Plan, supervise: Callable[[HostPlan], HostSupervisor]
) -> None:
    status = until(supervise(plan(mode="crash")), "failed")
    assert status.error is not None
    assert "boom, on purpose" in status.error.message


def test_nothing_is_started_in_a_closed_folder(plan: Plan, supervise: Callable[[HostPlan], HostSupervisor]) -> None:
    supervisor = supervise(plan())
    pid = until(supervisor, "ready").pid
    close_slots(plan().folder)
    os.kill(pid, signal.SIGKILL)
    assert wait_exit(pid, 30)
    until(supervisor, "ended")


def test_a_host_does_not_inherit_what_ray_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_JOB_ID", "7")
    environment = host_environment()
    assert "OMP_NUM_THREADS" not in environment
    assert not [name for name in environment if name.startswith("RAY_")]


def test_a_host_is_started_when_the_machine_can_again(
    plan: Plan, supervise: Callable[[HostPlan], HostSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise(plan())
    first, spawn, refused = until(supervisor, "ready"), HostSupervisor._spawn, []

    def refuse_twice(self: HostSupervisor) -> int:
        if len(refused) < 2:
            refused.append(self)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return spawn(self)

    monkeypatch.setattr(HostSupervisor, "_spawn", refuse_twice)
    os.kill(first.pid, signal.SIGKILL)
    assert until(supervisor, "ready", other_than=first.pid).restarts == 3


def test_a_machine_that_can_start_nothing_is_a_failure_that_says_why(
    plan: Plan, supervise: Callable[[HostPlan], HostSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: HostSupervisor) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(HostSupervisor, "_spawn", refuse)
    status = until(supervise(plan()), "failed")
    assert status.error is not None
    assert "Too many open files" in status.error.message


def test_stopping_while_a_host_is_started_leaves_no_process(
    plan: Plan, supervise: Callable[[HostPlan], HostSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, spawning, pids = HostSupervisor._spawn, threading.Event(), list[int]()

    def slowly(self: HostSupervisor) -> int:
        spawning.set()
        time.sleep(0.3)
        pids.append(spawn(self))
        return pids[-1]

    monkeypatch.setattr(HostSupervisor, "_spawn", slowly)
    supervisor = supervise(plan())
    assert spawning.wait(30)
    supervisor.stop(0.0)
    until(supervisor, "ended")
    assert session_members(pids[0]) == []


def test_the_log_says_how_each_host_ended(plan: Plan, supervise: Callable[[HostPlan], HostSupervisor]) -> None:
    supervisor = supervise(plan())
    first = until(supervisor, "ready")
    os.kill(first.pid, signal.SIGKILL)
    until(supervisor, "ready", other_than=first.pid)
    assert f"process {first.pid} ended with SIGKILL" in Path(plan().log).read_text()
