"""Short folders (unix sockets end at 107 bytes) and plans for the fake host."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.launch.supervise import HostPlan
from baton.process.processes import end_sessions
from baton.worker.slots import close_slots, holders

FAKE = Path(__file__).with_name("fake_host.py")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bt-") as name:
        yield Path(name)
        close_slots(name)
        end_sessions([pid for pid in holders(name).values() if pid != os.getpid()], 0.0)


@pytest.fixture
def plan(folder: Path) -> Callable[..., HostPlan]:
    def make(slot: str = "decode-0", mode: str = "stay") -> HostPlan:
        spec, log = f"{folder}|{slot}|{mode}", str(folder / f"{slot}.log")
        return HostPlan(slot, slot.split("-")[0], spec, str(folder), log, (sys.executable, str(FAKE)))

    return make
