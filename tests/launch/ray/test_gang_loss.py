"""A node of a real Ray dies while a slot that needs two is being placed: nothing hangs, and it is placed again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.process.children import child_environment
from baton.process.processes import kill_session

pytest.importorskip("ray")


@pytest.mark.thorough  # test_seats holds it with a stand-in for Ray
def test_a_gang_that_loses_a_node_as_it_is_placed_gives_its_place_back_and_is_placed_again(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.ray.gang_loss", str(folder)],
        env=child_environment(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=180)
    finally:
        kill_session(process.pid)
    said = json.loads(out.splitlines()[-1])
    assert said["state"] == "ready"
    assert said["killed"] not in said["now"]
    assert said["groups"] == ["CREATED", "REMOVED"]
    assert said["free"] == [], "two nodes are left, and it has both"
