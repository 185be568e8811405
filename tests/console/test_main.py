import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.console.main import app

run = CliRunner().invoke


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    command = [sys.executable, "-c", "from baton.console.main import app; app()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_the_version_is_printed() -> None:
    told = run(app, ["version"]).output
    assert re.fullmatch(r"\S+\n", told)
    assert run(app, ["--version"]).output == told


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "foo"], "router.policy: no routing policy 'foo'; choose one of cost"),
        (["--speculation", "suffix+nope"], "worker.speculation: speculation 'nope' isn't known; choose from none"),
        (["--speculation", "draft:/nope"], "worker.speculation: /nope: no such directory"),
        (["--run-dir", "/proc/nope"], "cluster.run_dir /proc/nope can't be made ("),
        (["--device", "paced:nope"], "worker.device: paced profile 'nope' is unknown; choose one of"),
        (
            ["--keys", "/nowhere.json"],
            "router.keys_file: /nowhere.json: no such file; `baton keys add TENANT` makes one",
        ),
    ],
)
def test_a_name_that_stands_for_nothing_is_told_before_anything_is_started(flags: list[str], said: str) -> None:
    given = run(app, ["serve", "--device", "paced:zero", *flags])
    assert given.exit_code == 1
    assert given.output.startswith(f"error: {said}"), given.output
    assert len(given.output.splitlines()) == 1


def test_help_names_the_flags_of_serve() -> None:
    text = run(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    for flag in (
        "--model",
        "--prefill",
        "--decode",
        "--colocated",
        "--dtype",
        "--device",
        "--grpc-port",
        "--config",
    ):
        assert flag in text


def test_a_model_that_is_not_there_is_one_line_and_a_failing_exit() -> None:
    done = baton("serve", "--model", "/no/such/model", "--port", "0", "--grpc-port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no model directory at /no/such/model")
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_with_its_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(app, ["serve", "--device", "paced:zero", "--port", port])
    assert done.exit_code == 1
    assert f"port {port} on 127.0.0.1" in done.stderr
    assert "--port" in done.stderr


def test_a_routable_address_without_insecure_is_refused() -> None:
    done = run(app, ["serve", "--device", "paced:zero", "--host", "0.0.0.0"])
    assert done.exit_code == 1
    assert "--insecure" in done.stderr


@pytest.mark.parametrize("text", ["[router]\nprot = 1\n", "[router\n"])
def test_a_bad_config_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(text)
    done = run(app, ["serve", "--config", str(file)])
    assert done.exit_code == 1
    assert "router.prot" in done.stderr or "baton.toml" in done.stderr


def test_workers_without_a_cluster_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    result = run(app, ["workers"])
    assert result.exit_code == 1
    assert "baton serve" in result.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("engine", "--kv", "fp3"), "--kv fp3 is unknown; choose of float32"),
        (("engine", "--json", "/nowhere/x"), "can't write /nowhere/x"),
        (("kv", "--plot", "/nowhere/x"), "can't write /nowhere/x"),
        (("kv", "--plot", "x.pdf"), "x.pdf: a plot is a .png or a .svg file"),
        (("engine", "--plot", "x"), "x: a plot is a .png or a .svg file"),
        (("kv", "--tier-model", "/nowhere"), "--tier-model /nowhere: no such directory"),
        (("router", "ttft", "--json", "/nowhere/x"), "can't write /nowhere/x"),
    ],
)
def test_a_benchmark_refuses_what_it_could_not_end_with_before_it_begins(wrong: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", *wrong])
    assert (done.exit_code, said in done.output) == (1, True), done.output


def test_a_profile_that_is_none_says_what_it_takes(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = '{"timestamp": %d, "input_length": 500, "output_length": 5, "hash_ids": [1]}\n'
    trace.write_text("".join(line % at for at in range(0, 3000, 100)))
    plan = ["plan", "--trace", str(trace), "--workers", "2", "--ttft", "1", "--tpot", "1", "--profile"]
    done = run(app, [*plan, "nope"])
    assert "a folder of operator timings, or roofline:MODEL@GPUxN" in done.stderr, done.stderr


def test_a_plan_refuses_a_plot_of_another_format_before_it_simulates() -> None:
    done = run(app, ["plan", "--trace", "t.csv", "--profile", "zero", "--workers", "2", "--plot", "dial.pdf"])
    assert (done.exit_code, "dial.pdf: a plot is a .png or a .svg file" in done.output) == (1, True), done.output


def test_commands_of_planning_refuse_a_file_that_cannot_be_before_they_begin() -> None:
    for command in (
        ("plan", "--trace", "t.csv", "--profile", "zero", "--workers", "2", "--helm", "/nowhere/v.yaml"),
        ("plan", "--trace", "t.csv", "--profile", "zero", "--workers", "2", "--plot", "/nowhere/v.svg"),
        ("size", "--trace", "t.csv", "--model", "llama-3-8b", "--json", "/nowhere/v.json"),
        ("profile", "import", "zero", "--out", "/nowhere/v.toml"),
        ("profile", "measure", "--out", "/nowhere/v.toml"),
        ("trace", "export", "t.jsonl", "--out", "/nowhere/v.jsonl"),
    ):
        done = run(app, [*command])
        assert (done.exit_code, "can't write /nowhere/v" in done.output) == (1, True), done.output


@pytest.mark.parametrize("price", ["-1", "nan", "inf", "x"])
def test_a_price_of_an_accelerator_that_cannot_be_is_refused_by_size(price: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 500, "output_length": 5, "hash_ids": [1]}\n')
    done = run(app, ["size", "--model", "llama-3.1-8b", "--trace", str(trace), "--gpus", f"h100={price}"])
    assert done.exit_code == 1
    assert "write name or name=price" in done.stderr


def test_an_error_quotes_what_was_given_as_it_is() -> None:
    done = run(app, ["sim", "--trace", "a:b:[c].jsonl", "--profile", "zero"])
    assert "can't read the trace a:b:[c].jsonl" in done.stderr


def test_a_worker_alone_is_refused_before_its_weights_are_loaded_where_its_draft_model_is_not_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "baton.toml").write_text(
        "[redis]\nurl = 'redis://127.0.0.1:1'\n[worker]\nspeculation = 'draft:/no'\n"
    )
    done = run(app, ["worker", "--role", "decode", "--slot", "x", "--config", str(tmp_path / "baton.toml")])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: worker.speculation: /no: no such directory")
