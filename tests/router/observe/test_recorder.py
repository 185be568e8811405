"""The redacted trace that a router writes."""

import asyncio
import errno
import io
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cluster.prefix_index import truncated
from baton.console.main import app
from baton.kv.layout.prefix import block_hashes
from baton.planner.traces.stats import stats
from baton.planner.traces.trace import read_trace
from baton.protos.errors import ConfigError
from baton.router.observe.recorder import KEPT_FILES, MOST_LINES, TraceRecorder

SECRET = list(range(40_000, 41_300))


class Clock:
    """Seconds since 1970, set by hand."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def recorder(path: Path, clock: Clock, max_bytes: int = 1 << 20) -> TraceRecorder:
    return TraceRecorder(str(path), max_bytes, clock, os.urandom)


def test_a_line_holds_times_lengths_and_what_was_seen_before_and_no_token(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "t.jsonl"
    trace = recorder(file, clock)
    trace.record(1.5, SECRET, 20)
    trace.record(0.5, [*SECRET[:600], 7], 3)
    trace.close()
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first["timestamp"] == 1_799_999_998_500
    assert (first["input_length"], first["output_length"], len(first["hash_ids"])) == (1300, 20, 3)
    assert second["hash_ids"][0] == first["hash_ids"][0]
    assert second["hash_ids"][1] not in first["hash_ids"]
    assert not any(str(token) in file.read_text() for token in (SECRET[0], SECRET[-1]))


@pytest.mark.parametrize("tokens", [5, 16, 512, 515, 528, 1024, 1300])
def test_the_routing_s_hashes_tell_blocks_apart_as_their_tokens_do(tmp_path: Path, tokens: int) -> None:
    """``chain`` has no hash of what is after the last full block of 16: a line must."""
    clock, prompt = Clock(), SECRET[:tokens]
    asked = [prompt, [*prompt[:-1], 7], [7, *prompt[1:]], [*prompt, 7], prompt[:-1], prompt]
    lines = []
    for hashed in (False, True):
        file = tmp_path / f"{hashed}.jsonl"
        trace = recorder(file, clock)
        for ids in asked:
            trace.record(0.0, ids, 3, truncated(block_hashes(b"root", ids)) if hashed else b"")
        trace.close()
        found = [json.loads(line) for line in file.read_text().splitlines()]
        first = min(min(line["hash_ids"]) for line in found)
        lines.append([line | {"hash_ids": [i - first for i in line["hash_ids"]]} for line in found])
    assert lines[0] == lines[1]
    assert lines[0][0]["hash_ids"] == lines[0][-1]["hash_ids"]


def test_what_it_writes_the_planner_reads(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "t.jsonl"
    trace = recorder(file, clock)
    for i in range(5):
        clock.now += 2.0
        trace.record(0.0, SECRET, 10 + i)
    read = read_trace(str(file))
    assert [r.arrival for r in read.requests] == pytest.approx([0, 2, 4, 6, 8])
    reuse = stats(read).reuse
    assert reuse is not None
    assert reuse.token_hit_rate == pytest.approx(0.8)


def test_a_long_file_is_rotated_and_old_ones_go(tmp_path: Path) -> None:
    trace = recorder(tmp_path / "t.jsonl", Clock(), max_bytes=1024)
    for _ in range(100):
        trace.record(0.0, SECRET, 1)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"t.jsonl", *(f"t.{n}.jsonl" for n in range(1, KEPT_FILES + 1))}
    assert all(file.stat().st_size < 2048 for file in tmp_path.iterdir())


def test_an_answer_without_tokens_leaves_no_line_and_a_lost_disk_no_error(tmp_path: Path) -> None:
    trace = recorder(tmp_path / "t.jsonl", Clock())
    trace.record(0.0, SECRET, 0)
    assert (tmp_path / "t.jsonl").read_text() == ""
    trace.close()
    trace.record(0.0, SECRET, 5)
    assert trace.lost == 1


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.jsonl"
    trace = recorder(file, Clock())
    for full in (False, True, True, False):
        if full:  # as a disk on which only a part has room
            with monkeypatch.context() as patch:
                patch.setattr(trace, "_file", Short(file))
                trace.record(0.0, SECRET, 5)
        else:
            trace.record(0.0, SECRET, 5)
    assert [json.loads(line)["output_length"] for line in file.read_text().splitlines()] == [5, 5]
    assert trace.lost == 2


@pytest.mark.parametrize("left", ["", '{"timestamp":17', '{"output_length":3}\n', '{"output_length":3}\n{"timest'])
def test_what_follows_half_a_line_of_an_earlier_run_is_a_line_of_its_own(tmp_path: Path, left: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(left)
    recorder(file, Clock()).record(0.0, SECRET, 5)
    written = [json.loads(line)["output_length"] for line in file.read_text().splitlines()]
    assert written == [3] * left.count("\n") + [5]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("first\nno line's end")
    with pytest.raises(ConfigError, match="is no trace"):
        recorder(file, Clock())
    assert file.read_text() == "first\nno line's end"


class Short(io.FileIO):
    """Takes half of what is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "ab")

    def write(self, data: bytes) -> int:
        return super().write(data[: len(data) // 2])


def test_a_rotation_that_opens_no_file_is_made_up_for_by_the_next_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    trace = recorder(tmp_path / "t.jsonl", Clock(), max_bytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", scarce)
        for _ in range(2):
            trace.record(0.0, SECRET, 1)
    trace.record(0.0, SECRET, 1)
    assert trace.lost == 1
    assert sum(len(file.read_text().splitlines()) for file in tmp_path.iterdir()) == 2


def test_a_path_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace") as caught:
        recorder(tmp_path / "none" / "t.jsonl", Clock())
    assert caught.value.param == "router.trace_file"


def test_files_of_several_routers_become_one_trace(tmp_path: Path) -> None:
    clock = Clock()
    ours, theirs = recorder(tmp_path / "a.jsonl", clock), recorder(tmp_path / "b.jsonl", clock)
    for at, trace in ((0.0, ours), (1.0, theirs), (2.0, ours)):
        clock.now = 1_800_000_000.0 + at
        trace.record(0.0, SECRET, 5)
    out = str(tmp_path / "all.jsonl")
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    done = CliRunner().invoke(app, ["trace", "export", *files, "--out", out])
    assert done.exit_code == 0, done.output
    requests = read_trace(out).requests
    assert [r.hash_ids for r in requests] == [(0, 1, 2), (3, 4, 5), (0, 1, 2)]
    assert [r.arrival for r in requests] == [0.0, 1.0, 2.0]
    done = CliRunner().invoke(app, ["trace", "export", *files, "--out", out, "--json", "-"])
    assert json.loads(done.stdout) == {"out": out, "requests": 3, "seconds": 2.0, "skipped": []}


async def test_a_router_that_is_told_to_records_each_answer(start_router, fake, model_dir, tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl"
    async with start_router(fake, {"tiny": model_dir}, trace_file=str(file)) as router:
        answer = await router.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "a b", "max_tokens": 5, "n": 2}
        )
        usage = answer.json()["usage"]
    requests = read_trace(str(file)).requests
    assert [r.output_length for r in requests] == [5, 5]
    assert requests[0].input_length == usage["prompt_tokens"]
    assert requests[0].hash_ids == requests[1].hash_ids


async def test_under_a_loop_lines_are_written_together_and_soon(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    trace = recorder(file, Clock())
    for _ in range(MOST_LINES - 1):
        trace.record(0.0, SECRET, 5)
    assert file.read_text() == ""
    trace.record(0.0, SECRET, 5)
    assert len(read_trace(str(file)).requests) == MOST_LINES
    trace.record(0.0, SECRET, 5)
    async with asyncio.timeout(20):
        while len(read_trace(str(file)).requests) == MOST_LINES:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("hashed", [False, True])
def test_adapters_are_numbered_kept_apart_and_never_named(tmp_path: Path, hashed: bool) -> None:
    file, ids = tmp_path / "t.jsonl", SECRET[:600]
    trace = recorder(file, Clock())
    for adapter in ("", "sql@1111111111111111", "style@2222222222222222", "sql@1111111111111111"):
        chain = truncated(block_hashes(adapter.encode(), ids)) if hashed else b""
        trace.record(0.0, ids, 3, chain, adapter)
    trace.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    numbers = [line.get("adapter") for line in lines]
    assert numbers[0] is None
    assert [n - numbers[1] for n in numbers[1:]] == [0, 1, 0]
    assert lines[1]["hash_ids"] == lines[3]["hash_ids"]
    assert len({line["hash_ids"][0] for line in lines}) == 3
    assert "sql" not in file.read_text()
