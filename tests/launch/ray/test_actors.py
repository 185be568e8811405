"""An actor's process without Ray: it ends with its raylet, whenever that dies."""

import subprocess
import sys

import pytest

from baton.launch.ray.actors import RAYLET_ENV

ACTOR = """
import time
from types import SimpleNamespace
from baton.launch.ray import actors as ray_actors
ray_actors.HostSupervisor = lambda plan: SimpleNamespace(start=lambda: print("supervises", flush=True))
ray_actors.WorkerActor('{"slot": "s", "role": "decode", "spec": "", "folder": "", "log": ""}')
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["before the actor looks", "later"])
def test_an_actor_ends_with_its_raylet(when: str) -> None:
    raylet = subprocess.Popen(["sleep", "60"])
    if when != "later":
        raylet.kill()
        raylet.wait()
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR], env={RAYLET_ENV: str(raylet.pid)}, stdout=subprocess.PIPE, text=True
    )
    with actor:
        if when == "later":
            assert actor.stdout is not None
            assert actor.stdout.readline() == "supervises\n"
            raylet.kill()
            raylet.wait()
        assert actor.wait(30) == 1
