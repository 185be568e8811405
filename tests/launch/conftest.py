"""Plans for the fake host."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.launch.supervise import HostPlan

FAKE = Path(__file__).with_name("fake_host.py")


@pytest.fixture
def plan(folder: Path) -> Callable[..., HostPlan]:
    def make(slot: str = "decode-0", mode: str = "stay") -> HostPlan:
        spec, log = f"{folder}|{slot}|{mode}", str(folder / f"{slot}.log")
        return HostPlan(slot, slot.split("-")[0], spec, str(folder), log, (sys.executable, str(FAKE)))

    return make
