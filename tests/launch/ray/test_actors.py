"""An actor's process without Ray: it ends with its raylet, whenever that dies."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.launch.plans import worker_plans
from baton.launch.ray.actors import RAYLET_ENV, told_of_ranks
from baton.launch.supervise import HostPlan
from baton.worker.spec import load_spec
from tests.launch.test_plans import config

ACTOR = """
import time
from types import SimpleNamespace
from baton.launch.ray import actors as ray_actors
ray_actors.HostSupervisor = lambda plan, start: SimpleNamespace(start=lambda: print("supervises", flush=True))
ray_actors.WorkerActor('{"slot": "s", "role": "decode", "spec": "", "folder": "", "log": ""}')
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["before the actor looks", "later"])
def test_an_actor_ends_with_its_raylet(when: str) -> None:
    raylet = subprocess.Popen(["sleep", "600"])
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
        assert actor.wait(90) == 1


def test_a_worker_hears_of_its_ranks_by_its_spec_or_its_environment(tmp_path: Path) -> None:
    plan = worker_plans(config(worker={"device": "paced:zero"}), "", "unix:///x", tmp_path, tmp_path)[0]
    file, addresses = tmp_path / "spec", ["a:1", "b:2"]
    command = ["host", "--spec", str(file)]
    for wanted in (addresses, addresses[:1]):  # an actor that was started again
        assert told_of_ranks(plan, command, wanted) == command
        told = load_spec(str(file))
        assert (told.engine.rank_hosts, told.engine.device) == (tuple(wanted), "paced:zero")
    by_command = told_of_ranks(HostPlan("s", "decode", "", "", ""), ["env"], addresses)
    done = subprocess.run(by_command, capture_output=True, text=True, check=True)
    assert 'BATON_WORKER__RANK_HOSTS=["a:1","b:2"]\n' in done.stdout
