"""`baton serve` as a user runs it: real processes, a real Redis, a real Ray, and nothing left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cluster.served_model import DEMO
from baton.console.main import app
from baton.process.processes import wait_exit
from tests.e2e.fleet import DRAFT
from tests.e2e.test_ranks import one_rank, prompt

PORTS = ("--port", "0", "--grpc-port", "0")
PACED = ("--device", "paced:zero", "--prefill", "1", "--decode", "1", *PORTS)


class Serving:
    """A running `baton serve`, its output read as it comes."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", "from baton.console.main import app; app()", "serve", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self.url = ""

    def until(self, pattern: str) -> re.Match[str]:
        """The first new line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("it ended:\n" + "".join(self.lines))

    def until_ready(self) -> None:
        self.url = self.until(r"Serving \S+ at (http://\S+)").group(1)
        self.until(r"Ctrl-C stops it")

    def family(self) -> list[int]:
        """Every process that came of it, by the run directory or parenthood."""
        return sorted({self.process.pid, *_of_run(self.run_dir), *_descendants(self.process.pid)})

    @property
    def run_dir(self) -> str:
        """The folder that it names as it starts."""
        folder = re.search(r"(/\S+)/logs", "".join(self.lines))
        assert folder is not None
        return folder.group(1)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.lines += list(self.process.stdout)
        return self.process.wait(90)


def _of_run(folder: str) -> list[int]:
    return [pid for pid, text in _commands().items() if folder in text]


def _commands() -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended since
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended since
        return 0


def _descendants(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    children = [int(child) for child in text.split()]
    return children + [below for child in children for below in _descendants(child)]


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []
    with tempfile.TemporaryDirectory(prefix="bt-", ignore_cleanup_errors=True) as folder:  # short, for its sockets

        def start(*arguments: str) -> Serving:
            started.append(Serving(*arguments, "--run-dir", f"{folder}/{len(started)}"))
            return started[-1]

        yield start
        for serving in started:
            print("".join(serving.lines))  # shown where the test failed
            if serving.process.poll() is None:
                serving.process.kill()
                serving.process.wait()


def complete(url: str, prompt: list[int], tokens: int = 8, model: str = "zero") -> dict:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    body |= {"ignore_eos": True, "repetition_penalty": 1.0}  # a model may come with a penalty of its own
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=90) as response:
        return json.load(response)


def test_it_scales_and_outlives_a_killed_worker_and_a_killed_raylet_and_ctrl_c_leaves_no_process(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(*PACED)
    serving.until_ready()
    with urllib.request.urlopen(f"{serving.url}/v1/models", timeout=90) as response:
        assert [model["id"] for model in json.load(response)["data"]] == ["zero"]
    answer = complete(serving.url, list(range(1, 200)))
    assert answer["usage"]["completion_tokens"] == 8
    pid = int(re.findall(r"decode-0.*pid (\d+)", "".join(serving.lines))[0])
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == own, "Ray would have it behind every other process"
    os.kill(pid, signal.SIGKILL)
    serving.until(r"decode-0\s+ready")
    again = complete(serving.url, list(range(1, 200)))
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]

    a_worker_more_is_placed_and_taken_away_again(serving)
    a_killed_raylet_stops_no_request_and_the_next_ray_adopts_the_workers(serving)
    family = serving.family()
    assert len(family) >= 9, "redis, router, ray's own, two hosts, two engines, us"
    assert serving.end(signal.SIGINT) == 0
    assert [pid for pid in family if not wait_exit(pid, 60.0)] == []
    assert "no process is left" in serving.lines[-1]


def a_worker_more_is_placed_and_taken_away_again(serving: Serving) -> None:
    redis = f"unix://{serving.run_dir}/redis/redis.sock"
    for count, state in ((2, "ready"), (1, "ended")):
        command = ["scale", f"decode={count}", "--redis", redis, "--namespace", "baton"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert f"prefill=1 decode={count}" in done.output
        serving.until(rf"decode-1\s+{state}")


def a_killed_raylet_stops_no_request_and_the_next_ray_adopts_the_workers(serving: Serving) -> None:
    hosts = dict(re.findall(r"(\w+-0)\s+ready.*pid (\d+)", "".join(serving.lines)))
    expected = complete(serving.url, list(range(1, 300)))["choices"][0]["token_ids"]
    raylet = next(pid for pid in serving.family() if _name(pid) == "raylet")
    os.kill(raylet, signal.SIGKILL)
    for seed in range(50):
        answer = complete(serving.url, [seed, *range(2, 300)])["choices"][0]["token_ids"]
        assert len(answer) == 8
    assert complete(serving.url, list(range(1, 300)))["choices"][0]["token_ids"] == expected
    adopted = [serving.until(r"(\w+-0)\s+ready.*pid (\d+) \(adopted\)").groups() for _ in hosts]
    assert dict(adopted) == hosts


@pytest.mark.thorough  # of a cluster without Ray: tests/launch/test_fleet.py
def test_a_serve_that_is_killed_leaves_no_process(serve: Callable[..., Serving]) -> None:
    serving = serve(*PACED)
    serving.until_ready()
    assert complete(serving.url, list(range(1, 200)))["usage"]["completion_tokens"] == 8
    is_killed_and_leaves_no_process(serving)


def is_killed_and_leaves_no_process(serving: Serving) -> None:
    family = serving.family()
    serving.process.kill()
    serving.process.wait()
    assert [pid for pid in family if not wait_exit(pid, 60.0)] == []
    assert serving.family() == [serving.process.pid]


@pytest.mark.thorough
def test_a_serve_that_is_killed_while_workers_start_leaves_no_process(serve: Callable[..., Serving]) -> None:
    serving = serve(*PACED)
    serving.until(r"decode-0\s+starting")
    is_killed_and_leaves_no_process(serving)


@pytest.mark.thorough
def test_sigterm_leaves_no_process(serve: Callable[..., Serving]) -> None:
    serving = serve(*PACED, "--colocated")
    serving.until_ready()
    family = serving.family()
    assert serving.end(signal.SIGTERM) == 0
    assert [pid for pid in family if not wait_exit(pid, 60.0)] == []


@pytest.mark.thorough  # tests/launch/test_servable.py
def test_a_model_that_no_engine_knows_is_refused_before_anything_is_started(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "nosuch"}')
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    serving = serve("--model", str(tmp_path), "--port", "0", "--grpc-port", "0")
    assert "nosuch" in serving.until(r"error: .*").group(0)
    assert serving.process.wait(90) == 1
    assert not any("redis" in line for line in serving.lines)


@pytest.mark.thorough  # without Ray and flags: tests/e2e/test_ranks.py
@pytest.mark.parametrize("flags", [("--tp", "2"), ("--prefill-tp", "2", "--decode-tp", "1")], ids=" ".join)
def test_flags_share_a_model_among_ranks_that_answer_as_one_and_are_gone_with_it(
    serve: Callable[..., Serving], flags: tuple[str, ...]
) -> None:
    serving = serve("--model", DRAFT, "--prefill", "1", "--decode", "1", *flags, *PORTS)
    serving.until_ready()
    answer = complete(serving.url, prompt(1, 150), 30, Path(DRAFT).name)["choices"][0]["token_ids"]
    assert answer == one_rank(prompt(1, 150), 30)
    family = serving.family()
    others = [pid for pid, text in _commands().items() if "backends.ranks" in text and _parent(pid) in family]
    assert len(others) == (2 if flags[0] == "--tp" else 1), "one beside the lead of each worker of two"
    assert serving.end(signal.SIGINT) == 0
    assert [pid for pid in (*family, *others) if not wait_exit(pid, 60.0)] == []


@pytest.mark.thorough  # tests/launch/test_servable.py holds more of them in one process
def test_a_width_that_cannot_be_is_refused_before_anything_is_started(serve: Callable[..., Serving]) -> None:
    serving = serve("--model", DRAFT, "--tp", "5", *PORTS)
    assert "tp is 5, and the model has 4 attention heads; use 1 to 4" in serving.until(r"error: .*").group(0)
    assert serving.process.wait(90) == 1
    assert not any("redis" in line for line in serving.lines)


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_a_clear_message_and_a_failing_exit(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    serving = serve("--model", str(tmp_path), "--port", "0", "--grpc-port", "0")
    assert "safetensors" in serving.until(r"error: .*").group(0)
    assert serving.process.wait(90) == 1
    assert serving.family() == [serving.process.pid]
