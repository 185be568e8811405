import os
import socket
from pathlib import Path

import msgspec
import pytest

from baton.cluster.config import load_config
from baton.launch.local import LocalCluster
from baton.launch.ray.app import PlacementSpec
from baton.launch.run_files import RunFiles, choose_root
from baton.launch.supervise import SlotStatus
from baton.protos.errors import ConfigError

PACED = {"device": "paced:zero"}


def nothing(part: str, what: str) -> None:
    pass


def test_a_port_in_use_is_named_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key, flag in (("port", "--port"), ("grpc_port", "--grpc-port")):
            settings = load_config(flags={"worker": PACED, "router": {"port": 0, "grpc_port": 0, key: port}})
            with pytest.raises(ConfigError, match=f"{key} {port} .*in use.* {flag}"):
                LocalCluster(settings, nothing)


def test_workers_elsewhere_need_a_redis_they_can_reach() -> None:
    settings = load_config(flags={"worker": PACED, "ray": {"address": "10.0.0.1:6379"}})
    with pytest.raises(ConfigError, match="--redis"):
        LocalCluster(settings, nothing)


def test_a_run_directory_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    settings = load_config(flags={"cluster": {"run_dir": str(tmp_path / ("x" * 60))}})
    with pytest.raises(ConfigError, match=r"cluster\.run_dir"):
        choose_root(settings)


def test_only_logs_outlive_a_run(folder: Path) -> None:
    files = RunFiles(choose_root(load_config(flags={"cluster": {"run_dir": str(folder / "run")}})))
    (files.logs / "x.log").write_text("kept")
    files.config.write_text("{}")
    files.tidy()
    assert [p.name for p in files.root.iterdir()] == ["logs"]


def test_a_folder_belongs_to_one_run_at_a_time(folder: Path) -> None:
    files = RunFiles(folder / "run", alone=True)
    (files.slots / "closed").touch()
    with pytest.raises(
        ConfigError, match=rf"is in use by the cluster of process {os.getpid()}.*BATON_CLUSTER__RUN_DIR"
    ):
        RunFiles(folder / "run", alone=True)
    assert (files.slots / "closed").exists(), "nothing of the other run was touched"
    files.tidy()
    assert [p.name for p in files.root.iterdir()] == ["logs"]
    RunFiles(folder / "run", alone=True).tidy()


def test_a_worker_that_another_supervisor_takes_over_at_once_is_told_of(folder: Path) -> None:
    told: list[tuple[str, str]] = []
    settings = {"worker": PACED, "router": {"port": 0, "grpc_port": 0}, "cluster": {"run_dir": str(folder / "run")}}
    cluster = LocalCluster(load_config(flags=settings), lambda part, what: told.append((part, what)))
    ready = SlotStatus("prefill-0", "ready", 12, "127.0.0.1:1")
    for status in (SlotStatus("prefill-0", "starting"), SlotStatus("prefill-0", "starting", 12)):
        cluster._take(status)
    for status in (ready, ready, msgspec.structs.replace(ready, adopted=True)):
        cluster._take(status)
    text = "ready at 127.0.0.1:1, pid 12"
    assert told == [("prefill-0", "starting"), ("prefill-0", text), ("prefill-0", f"{text} (adopted)")]


def test_a_ray_that_is_started_again_waits_for_room(folder: Path) -> None:
    settings = {"worker": PACED, "router": {"port": 0, "grpc_port": 0}, "cluster": {"run_dir": str(folder / "run")}}
    cluster = LocalCluster(load_config(flags=settings), nothing)
    for is_up in (False, True):
        cluster._is_up = is_up
        file = cluster._write_placement(cluster.plans())
        assert msgspec.json.decode(Path(file).read_bytes(), type=PlacementSpec).must_fit is not is_up
