"""The cluster without Ray: up, taken apart, up again; and gone however its process ends."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from baton.launch.fleet import Fleet
from baton.process.processes import wait_exit
from baton.protos.errors import ConfigError, StartupError

PACED = {"device": "paced:zero"}
ONE = {"prefill": 0, "decode": 1, "colocated": True}


def test_a_cluster_answers_and_none_of_its_processes_outlives_it() -> None:
    with Fleet(cluster={"prefill": 1, "decode": 1}, worker=PACED) as fleet:
        assert fleet.slots == ["decode-0", "prefill-0"]
        assert (fleet.workers_ready(), fleet.reachable()) == (2, 2)
        assert fleet.router is not None
        fleet.router.kill()
        fleet.router.wait()
        assert not fleet.answers()
        fleet.start_router()
        deadline = time.monotonic() + 90
        while not fleet.answers():
            assert time.monotonic() < deadline, fleet.log("router")
            time.sleep(0.05)
        with urllib.request.urlopen(fleet.url + "/v1/models", timeout=30) as response:
            assert response.status == 200
        records = [fleet.record(slot) for slot in fleet.slots]
        pids = [fleet.router.pid, *(r.pid for r in records), *(r.engine_pid for r in records)]
    assert all(wait_exit(pid, 30) for pid in pids)
    assert not fleet.folder.exists()


def test_what_can_not_start_is_refused_by_its_own_error_and_leaves_nothing() -> None:
    fleet = Fleet(cluster=ONE, worker={"device": "paced:no-such-profile"})
    with pytest.raises(StartupError, match="no-such-profile") as caught, fleet:
        pass
    assert isinstance(caught.value, ConfigError)
    assert not fleet.folder.exists()


def test_a_killed_owner_takes_every_process_with_it(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from baton.launch.fleet import Fleet\n"
        f"with Fleet(cluster={ONE}, worker={PACED}) as f:\n"
        "    record = f.record('decode-0')\n"
        "    print(f.router.pid, record.pid, record.engine_pid, f.redis_pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 4
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert all(wait_exit(pid, 30) for pid in pids)
