"""A worker host that hangs, or dies as it starts: its slot comes free and nothing of it is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from baton.process.processes import wait_exit
from tests.thorough import first_now
from tests.worker.host_rig import Host

PLANTED = """
import asyncio, time
from baton.worker import host
async def hang_async(*a): await asyncio.sleep(600)
def hang(*a): time.sleep(600)
{trouble}
host.end_with(host.main)
"""
IN_LEAVING = {
    "the event loop blocks": "host.RoleRuntime.lost, host.LOST_S = hang, 1.0",
    "a close never ends": "host.WorkerBlocks.close, host.LOST_S = hang_async, 1.0",
}


class Planted(Host):
    """A host with something wrong in it."""

    def __init__(self, folder: Path, trouble: str) -> None:
        self.command = ("-c", PLANTED.format(trouble=trouble))
        self.log = folder / "host.log"
        with self.log.open("wb") as log:
            super().__init__(folder, "decode", log=log)


@pytest.mark.parametrize("trouble", first_now([*IN_LEAVING.values()]), ids=IN_LEAVING.keys())
def test_one_that_hangs_after_its_engine_was_killed_ends_and_says_where(tmp_path: Path, trouble: str) -> None:
    host = Planted(tmp_path, trouble)
    os.kill(host.record().engine_pid, signal.SIGKILL)
    assert host.process.wait(60) == 1
    assert "most recent call first" in host.log.read_text()
    assert host.slot.acquire()


def test_one_that_hangs_as_it_opens_its_ports_is_ended_with_its_engine(tmp_path: Path) -> None:
    host = Planted(tmp_path, "host.serve_grpc, host.OPEN_S = hang_async, 1.0")
    engine = child_of(host.process.pid)
    assert host.process.wait(60) == 1
    assert wait_exit(engine, 30)


def test_one_whose_event_loop_stands_still_is_ended_with_its_engine(tmp_path: Path) -> None:
    blocks = (
        "async def block(*a): await asyncio.sleep(0.5); hang()\nhost.RoleRuntime.listen, host.HUNG_S = block, 3.0"
    )
    host = Planted(tmp_path, blocks)
    engine = host.record().engine_pid
    assert host.process.wait(60) == 1
    assert "in hang" in host.log.read_text()
    assert wait_exit(engine, 30)


@pytest.mark.thorough  # every longer test of real workers would see it, too
def test_one_that_serves_goes_on_past_the_limit(tmp_path: Path) -> None:
    host = Planted(tmp_path, "host.OPEN_S, host.HUNG_S = 5.0, 2.0")
    host.record()
    time.sleep(3)
    assert host.process.poll() is None
    assert host.end() == 0


def test_one_that_fails_with_its_server_up_ends(tmp_path: Path) -> None:
    host = Planted(tmp_path, "host.join = None")  # calling it is a TypeError, after the server began
    assert host.process.wait(60) == 1
    assert "TypeError" in host.log.read_text()


def test_a_thread_that_never_ends_does_not_keep_the_slot(tmp_path: Path) -> None:
    host = Planted(tmp_path, "import threading; threading.Thread(target=hang).start()")
    host.record()
    assert host.end() == 0


@pytest.mark.parametrize("after_s", first_now([0.1, 0.0, 0.4]))
def test_an_engine_whose_host_is_killed_while_both_start_ends_too(tmp_path: Path, after_s: float) -> None:
    host = Host(tmp_path, "decode")
    engine = child_of(host.process.pid)
    time.sleep(after_s)
    host.process.kill()
    host.process.wait()
    assert wait_exit(engine, 30)
    assert host.slot.acquire()


def child_of(pid: int) -> int:
    """The engine that a host has just started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.005)
    raise AssertionError("no engine was started")
