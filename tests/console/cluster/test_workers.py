"""Tests what `baton workers` says of each worker's version."""

import os
import tempfile
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from baton.cluster.config import BatonConfig, ClusterConfig, RedisConfig, RouterConfig, WorkerConfig
from baton.cluster.membership import WorkerEntry
from baton.console.cluster.ranks import widths_in_words
from baton.console.cluster.workers import (
    RUN_DIR,
    hosts_table,
    local_config,
    meeting_place,
    show_workers,
    table,
    version_of,
)
from baton.launch.redis_server import RedisServer
from baton.launch.run_files import RunFiles
from baton.launch.single import run_router
from baton.protos.errors import ConfigError, NoWorker
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.protos.version import PROTOCOL

INFO = WorkerInfo(
    "decode-0", "i", "decode", "10.0.0.3:8100", "m", "f", KvLayout("float32", (), 256, "float32"), 16, 16, (), 1
)


@pytest.mark.parametrize(
    ("build", "protocol", "shown"),
    [
        ("1.2.3", PROTOCOL, "1.2.3"),
        ("1.2.2", "1.0", "1.2.2, protocol 1.0"),
        ("", "1.0", "?, protocol 1.0"),
        ("9.0.0", "1.9", "[red]9.0.0, protocol 1.9: refused[/]"),
    ],
)
def test_a_workers_version_is_shown_and_whether_we_run_together(build: str, protocol: str, shown: str) -> None:
    assert version_of(msgspec.structs.replace(INFO, version=build, protocol=protocol)) == shown


def test_every_worker_has_a_row_with_its_version() -> None:
    text = StringIO()
    entry = WorkerEntry(msgspec.structs.replace(INFO, version="1.2.3"), WorkerLoad(), 0.2)
    Console(file=text, width=160).print(table({"decode-0": entry}))
    header, row = text.getvalue().splitlines()[:2]
    assert "version" in header
    assert {"decode-0", "1.2.3", "10.0.0.3:8100"} <= set(row.split())


def test_the_adapters_of_workers_have_a_column_where_there_are_any() -> None:
    text, many = StringIO(), tuple(f"a{at}@{'1' * 16}" for at in range(5))
    rows = {"decode-0": many, "prefill-0": ()}
    entries = {
        name: WorkerEntry(msgspec.structs.replace(INFO, adapters=a), WorkerLoad(), 0.2) for name, a in rows.items()
    }
    Console(file=text, width=180).print(table(entries))
    header, row = text.getvalue().splitlines()[:2]
    assert "adapters" in header
    assert "a0, a1, a2 and 2 more" in row


def test_the_widths_of_workers_have_a_column_and_ranks_on_other_hosts_a_table() -> None:
    wide = msgspec.structs.replace(
        INFO, widths={"tp": 2, "pp": 2}, rank_hosts=("", "", "10.0.0.2:7100", "[fe80::2]:7100")
    )
    entries = {"decode-0": WorkerEntry(INFO, WorkerLoad(), 0.2), "wide-0": WorkerEntry(wide, WorkerLoad(), 0.2)}
    text = StringIO()
    console = Console(file=text, width=180)
    console.print(table(entries))
    console.print(hosts_table(entries))
    header, one, several, _, *places = text.getvalue().splitlines()
    assert header.split().index("ranks") == 4
    assert one.split()[4] == "1"
    assert "tp 2 x pp 2" in several
    assert [line.split() for line in places] == [
        ["wide-0", "0-1", "10.0.0.3"],
        ["wide-0", "2", "10.0.0.2:7100"],
        ["wide-0", "3", "[fe80::2]:7100"],
    ]
    assert hosts_table({"decode-0": entries["decode-0"]}) is None


@pytest.mark.parametrize(
    ("widths", "words"),
    [({"tp": 2, "ep": 2}, "tp/ep 2"), ({"tp": 2, "pp": 3, "ep": 2}, "tp/ep 2 x pp 3"), ({"ep": 4}, "ep 4")],
)
def test_ranks_that_divide_columns_and_experts_are_counted_once(widths: dict[str, int], words: str) -> None:
    assert widths_in_words(widths) == words


def test_without_a_redis_it_is_the_cluster_of_this_machine_or_of_this_pod_with_its_namespace(monkeypatch) -> None:
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        server = RedisServer(Path(folder)).start()
        try:
            config = BatonConfig(redis=RedisConfig(url=server.url), cluster=ClusterConfig(namespace="llm.demo"))
            Path(folder, "config.json").write_text(config.model_dump_json())
            monkeypatch.setenv(RUN_DIR, folder)
            monkeypatch.setattr(tempfile, "tempdir", folder)
            assert meeting_place(None, "") == (server.url, "llm.demo")
            assert meeting_place(None, "other") == (server.url, "other")
            assert meeting_place(server.url, "") == (server.url, "baton")
            with pytest.raises(ConfigError, match="no Redis answers"):
                meeting_place("unix:///nowhere", "")
            with pytest.raises(NoWorker, match="namespace 'empty'"):
                show_workers(server.url, "empty")
        finally:
            server.stop()


def test_several_clusters_on_a_machine_are_listed_and_none_is_picked_in_silence(
    tmp_path, monkeypatch, server, capsys
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(RUN_DIR, raising=False)

    def runs(name: str, redis_url: str) -> str:
        config = BatonConfig(redis=RedisConfig(url=redis_url), cluster=ClusterConfig(namespace=name))
        folder = tmp_path / f"baton-{name}"
        folder.mkdir()
        (folder / "config.json").write_text(config.model_dump_json())
        return str(folder)

    runs("over", "unix:///nowhere")
    with pytest.raises(ConfigError, match=r"no cluster runs in .*/baton-\*.*started with --run-dir"):
        meeting_place(None, "")
    one = runs("one", server.url)
    assert meeting_place(None, "")[1] == "one"
    assert one in "".join(capsys.readouterr().err.split())
    two = runs("two", server.url)
    with pytest.raises(ConfigError, match="2 clusters run on this machine") as several:
        meeting_place(None, "")
    assert all(f"{RUN_DIR}={folder}" in several.value.message for folder in (one, two))
    monkeypatch.setenv(RUN_DIR, one)
    assert meeting_place(None, "")[1] == "one"
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "baton-over"))
    with pytest.raises(ConfigError, match=r"no cluster runs in .*baton-over"):
        meeting_place(None, "")


def test_what_a_killed_router_of_a_cluster_left_is_no_second_cluster(tmp_path, monkeypatch, server) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(RUN_DIR, raising=False)
    for port, age in ((8000, 0), (8100, 100)):
        file = tmp_path / f"baton-{port}" / "config.json"
        file.parent.mkdir()
        config = BatonConfig(redis=RedisConfig(url=server.url), router=RouterConfig(port=port))
        file.write_text(config.model_dump_json())
        os.utime(file, (1e9 - age, 1e9 - age))
    assert local_config(tmp_path).router.port == 8000, "the latest"


def test_a_router_that_could_not_start_leaves_no_sign_of_a_running_cluster(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise ConfigError("no keys", "router.keys_file")

    monkeypatch.setattr("baton.router_host.main.run", refuse)
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        config = BatonConfig(
            redis=RedisConfig(url="unix:///nowhere"), cluster=ClusterConfig(run_dir=folder),
            worker=WorkerConfig(device="paced:zero"),
        )  # fmt: skip
        with pytest.raises(ConfigError, match="no keys"):
            run_router(config)
        assert not Path(folder, "config.json").exists()


def test_a_router_is_refused_the_folder_of_another_and_leaves_its_files() -> None:
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        first = RunFiles(Path(folder), alone=True)
        first.config.write_text("of the first")
        config = BatonConfig(
            redis=RedisConfig(url="unix:///nowhere"), cluster=ClusterConfig(run_dir=folder),
            worker=WorkerConfig(device="paced:zero"),
        )  # fmt: skip
        with pytest.raises(ConfigError, match="is in use by the cluster of process"):
            run_router(config)
        assert first.config.read_text() == "of the first"
        first.tidy()
