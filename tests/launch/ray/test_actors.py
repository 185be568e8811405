"""An actor's process without Ray: it ends with its raylet, whenever that dies."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.engine.backends.ranks.hosts.control import dial
from baton.engine.backends.ranks.hosts.secured import rank_identity
from baton.launch.plans import worker_plans
from baton.launch.ray.actors import RAYLET_ENV, told_of_ranks
from baton.launch.supervise import HostPlan
from baton.protos.errors import StartupError
from baton.worker.spec import load_spec
from tests.launch.test_plans import config
from tests.tls.papers import files

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


RANKS = """
import sys, time
from types import SimpleNamespace
sys.modules["ray"] = sys.modules["ray.util"] = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
from baton.launch.ray.actors import RankActor
print(RankActor("", sys.argv[1]).address(), flush=True)
time.sleep(600)
"""


def test_an_actor_on_a_further_node_serves_ranks_by_the_plans_certificate_alone() -> None:
    raylet = subprocess.Popen(["sleep", "600"])
    tls = msgspec.json.encode(files("worker")).decode()
    command, environment = [sys.executable, "-c", RANKS, tls], os.environ | {RAYLET_ENV: str(raylet.pid)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None
        address = actor.stdout.readline().strip()
        with pytest.raises(StartupError, match="speaks TLS, and this worker doesn't"):
            dial(address, b"", "worker.rank_hosts")
        with pytest.raises(StartupError, match="refuses this worker's certificate"):
            dial(address, b"", "worker.rank_hosts", identity=rank_identity(files("router"), "a port"))
        dial(address, b"", "worker.rank_hosts", identity=rank_identity(files("worker"), "a port")).close()
        raylet.kill()
        raylet.wait()
        assert actor.wait(90) == 1
