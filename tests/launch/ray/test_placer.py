"""A Ray that others started is filled with as many workers as somebody asks for, which outlive who placed them."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from baton.cluster.config import load_config
from baton.launch.ports import free_ports
from baton.launch.ray.actors import actor_name
from baton.launch.ray.app import PlacementSpec, RayPlacement
from baton.launch.ray.node_choice import Seat, SlotRequest
from baton.launch.ray.placer import plans_of, spec_of
from baton.launch.redis_server import RedisServer
from baton.launch.single import drain_workers, run_worker, usable_cores
from baton.launch.supervise import host_environment
from baton.process.processes import end_sessions, wait_exit
from baton.protos.errors import ConfigError
from baton.worker.slots import holders

UP_S = 120.0
ROOM = {"baton_prefill": 1, "baton_decode": 2}


def config(folder: str = "/run/baton", **cluster):
    flags = {
        "cluster": {"run_dir": folder, **cluster},
        "ray": {"address": "10.0.0.1:6379", "auth_mode": "disabled"},
        "redis": {"url": "redis://redis:6379"},
    }
    return load_config(flags=flags, search=Path("/nowhere"))


def test_every_slot_runs_the_command_that_a_pod_would_with_its_nodes_own_config() -> None:
    plans = plans_of(config(prefill=2, decode=1), "/etc/baton.toml")
    assert [p.slot for p in plans] == ["prefill-0", "prefill-1", "decode-0"]
    assert plans[0].command[1:] == (
        *("-m", "baton", "worker", "--role", "prefill", "--slot", "prefill-0"),
        *("--config", "/etc/baton.toml"),
    )
    assert {p.folder for p in plans} == {"/run/baton/slots"}
    assert all(not p.spec for p in plans)


def test_another_plan_is_another_actor() -> None:
    before, after = plans_of(config(), "/a.toml")[0], plans_of(config(), "/b.toml")[0]
    here, there = (Seat(SlotRequest(before.slot, before.role, {}), node) for node in "nm")
    assert actor_name(before, here) != actor_name(after, here)
    assert actor_name(before, here) == actor_name(plans_of(config(prefill=3), "/a.toml")[0], here)
    assert actor_name(before, here) != actor_name(before, there), "elsewhere is another one"


def test_a_pools_workers_ask_for_its_nodes() -> None:
    pool = {
        "name": "long", "role": "prefill", "count": 1, "resources": {"baton_long": 1, "CPU": 8},
        "labels": {"accelerator": "h200"}, "gang": 2,
    }  # fmt: skip
    plan = plans_of(config(pools=[pool]), "")[-1]
    assert (plan.slot, plan.role, plan.gang) == ("long-0", "prefill", 2)
    assert plan.resources == {"baton_long": 1, "CPU": 8}
    assert plan.labels == {"accelerator": "h200"}


def test_placing_for_good_is_the_placement_of_serve_with_other_settings() -> None:
    settings = load_config(
        flags={"ray": {"address": "10.0.0.1:6379", "placement": "spread"}, "worker": {"drain_grace_s": 9}},
        search=Path("/nowhere"),
    )
    spec = spec_of(settings, ())
    assert (spec.lasting, spec.strategy, spec.drain_s) == (True, "spread", 9)


def test_a_clusters_workers_have_names_within_its_namespace() -> None:
    """Another cluster's placer in the same Ray would take them over, and drain what it didn't plan."""
    assert spec_of(config(namespace="ours"), ()).namespace == "ours"
    for address in ("", "10.0.0.1:6379"):
        asked: dict[str, object] = {}
        placement = RayPlacement(PlacementSpec((), "/x", address, namespace="ours"))
        placement.ray = SimpleNamespace(
            init=lambda asked=asked, **given: (
                asked.update(given) or SimpleNamespace(address_info={"gcs_address": "a"})
            )
        )
        placement.connect()
        assert asked["namespace"] == "ours"


@pytest.mark.parametrize(("section", "key"), [("ray", "ray.address"), ("cluster", "cluster.run_dir")])
def test_what_is_missing_is_named(section: str, key: str) -> None:
    empty = {"ray": {"address": ""}, "cluster": {"run_dir": ""}}[section]
    settings = config()
    settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update=empty)})
    with pytest.raises(ConfigError) as refused:
        plans_of(settings, "")
    assert refused.value.param == key


def test_a_worker_alone_needs_a_redis_and_a_good_name() -> None:
    for slot, key in (("", "redis.url"), ("../x", "slot")):
        with pytest.raises(ConfigError) as refused:
            run_worker(load_config(search=Path("/nowhere")), "decode", slot)
        assert refused.value.param == key


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None)])
def test_a_containers_cpu_limit_counts(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    allowed = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "cpu.max") == min(allowed, cores or allowed)
    assert usable_cores(tmp_path / "none") == allowed


def test_draining_a_host_without_workers_is_nothing(folder: Path) -> None:
    assert drain_workers(config(str(folder))) == 0


@pytest.mark.soak
def test_placed_workers_serve_outlive_the_placer_and_are_drained() -> None:
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bp-")))
        ports = [_free() for _ in range(3)]
        redis = _tcp_redis(root, stack)
        ray = _ray(root, ports[0], stack)
        file = root / "baton.toml"
        file.write_text(
            f"[redis]\nurl = '{redis}'\n[ray]\naddress = '127.0.0.1:{ports[0]}'\nauth_mode = 'disabled'\n"
            f"[cluster]\nrun_dir = '{root}/r'\n[worker]\ndevice = 'paced:zero'\n"
            f"[router]\nport = {ports[1]}\ngrpc_port = {ports[2]}\n"
        )
        stack.callback(lambda: end_sessions(holders(root / "r" / "slots").values(), 0.0))
        placer = _baton(root, "place", stack, "--config", str(file))
        _baton(root, "router", stack, "--config", str(file))
        url = f"http://127.0.0.1:{ports[1]}"
        _until(lambda: _reachable(url) == 2, root, placer, ray)
        before = holders(root / "r" / "slots")
        assert _answers(url)
        assert _scaled(redis, "decode=2") == 0
        _until(lambda: _reachable(url) == 3, root, placer, ray)
        assert _scaled(redis, "decode=1") == 0
        placer.terminate()  # its worker may just be ending
        assert placer.wait(20) == 0
        _until(lambda: holders(root / "r" / "slots") == before, root, ray)
        assert _answers(url)
        again = _baton(root, "place", stack, "--config", str(file), more={"BATON_CLUSTER__DECODE": "2"})
        _until(lambda: _reachable(url) == 3, root, again, ray)
        after = holders(root / "r" / "slots")
        assert {name: after[name] for name in before} == before
        assert drain_workers(load_config(str(file))) == 0
        assert all(wait_exit(pid, 5) for pid in after.values())
        assert holders(root / "r" / "slots") == {}


@pytest.mark.soak
def test_two_clusters_of_one_ray_leave_each_others_workers_alone() -> None:
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bp-")))
        port, redis = _free(), _tcp_redis(root, stack)
        ray = _ray(root, port, stack, {"baton_prefill": 2, "baton_decode": 2})
        slots = {name: root / name / "slots" for name in ("one", "two")}
        placers, before = [], dict[str, int]()
        for name in slots:
            file = root / f"{name}.toml"
            file.write_text(
                f"[redis]\nurl = '{redis}'\n[ray]\naddress = '127.0.0.1:{port}'\nauth_mode = 'disabled'\n"
                f"[cluster]\nnamespace = '{name}'\nrun_dir = '{root}/{name}'\n[worker]\ndevice = 'paced:zero'\n"
            )
            stack.callback(lambda name=name: end_sessions(holders(slots[name]).values(), 0.0))
            placers.append(_baton(root, "place", stack, "--config", str(file)))
            _until(lambda name=name: set(holders(slots[name])) == {"prefill-0", "decode-0"}, root, ray, *placers)
            before = before or holders(slots["one"])
        time.sleep(10)
        assert holders(slots["one"]) == before
        assert set(holders(slots["two"])) == {"prefill-0", "decode-0"}


def _scaled(redis: str, *numbers: str) -> int:
    """`baton scale`, which waits until it is so."""
    return subprocess.run(
        [sys.executable, "-m", "baton", "scale", *numbers, "--redis", redis],
        env=host_environment(),
        timeout=UP_S,
        check=False,
    ).returncode


def _free() -> int:
    [port] = free_ports(1)
    return port


def _tcp_redis(root: Path, stack: contextlib.ExitStack) -> str:
    server = RedisServer(root / "redis").start()
    stack.callback(server.stop)
    return server.url


def _ray(root: Path, port: int, stack: contextlib.ExitStack, offered: Mapping[str, int] = ROOM) -> subprocess.Popen:
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
        *(f"--port={port}", "--include-dashboard=false", "--num-cpus=1", "--object-store-memory=83886080"),
        *(
            f"--temp-dir={root}/ray",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--ray-client-server-port={_free()}",
        ),
        f"--resources={json.dumps(offered)}",
    ]
    env = host_environment() | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return _started(command, env, root / "ray.log", stack)


def _baton(root: Path, what: str, stack: contextlib.ExitStack, *arguments: str, more=None) -> subprocess.Popen:
    command = [sys.executable, "-m", "baton", what, *arguments]
    return _started(command, host_environment() | (more or {}), root / f"{what}.log", stack)


def _started(command, env, log: Path, stack: contextlib.ExitStack) -> subprocess.Popen:
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    stack.callback(process.wait)
    stack.callback(end_sessions, [process.pid], 5.0)
    return process


def _reachable(url: str) -> int:
    with contextlib.suppress(httpx.HTTPError):
        lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("baton_workers{")))
    return 0


def _answers(url: str) -> bool:
    body = {"model": "zero", "prompt": [5] * 200, "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200


def _until(condition, root: Path, *alive: subprocess.Popen) -> None:
    deadline = time.monotonic() + UP_S
    while not condition():
        logs = "\n".join(
            f"{p.name}: {p.read_text(errors='replace')[-1500:]}"
            for p in [*root.glob("*.log"), *root.glob("r/logs/*")]
        )
        assert all(p.poll() is None for p in alive), logs
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
