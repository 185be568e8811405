"""Readers of Mooncake JSONL and Azure CSV, and what is said of a trace."""

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.console.main import app
from baton.planner.traces.stats import cached_tokens, stats
from baton.planner.traces.trace import TraceError, joined, read_trace, to_mooncake
from baton.protos.errors import InvalidRequest
from baton.router.observe.recorder import TraceRecorder

DATA = Path(__file__).parents[2] / "data"
MOONCAKE, AZURE = DATA / "mooncake_conversation_400.jsonl", DATA / "azure_2023_conversation_300.csv"
GOOD = '{"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'


def write(tmp_path: Path, name: str, *lines: str) -> str:
    file = tmp_path / name
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_both_formats_give_requests_in_order_from_second_zero() -> None:
    for file, count in ((MOONCAKE, 400), (AZURE, 300)):
        trace = read_trace(str(file))
        assert len(trace.requests) == count
        assert trace.requests[0].arrival == 0.0
        assert sorted(r.arrival for r in trace.requests) == [r.arrival for r in trace.requests]
    assert read_trace(str(MOONCAKE)).has_hashes
    assert read_trace(str(AZURE)).requests[1].arrival == pytest.approx(4.314579, abs=1e-6)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Input data was truncated"),
        ('{"timestamp": 1, "output_length": 1}', "input_length"),
        (GOOD.replace("600", '"many"'), "int"),
        (GOOD.replace("600", "0"), "must be 1"),
        (GOOD.replace("10,", "-10,"), "0 or later"),
        (GOOD.replace("[1, 2]", "[1]"), "2 blocks"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_or_skipped_by_choice(tmp_path: Path, line: str, reason: str) -> None:
    file = write(tmp_path, "t.jsonl", GOOD, line, GOOD)
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert caught.value.line == 2
    assert reason in caught.value.message
    kept = read_trace(file, skip_bad=True)
    assert len(kept.requests) == 2
    assert "line 2" in kept.skipped[0]


@pytest.mark.parametrize("row", ["yesterday,1,1", "2023-11-16 18:15:46,1", "2023-11-16 18:15:46,1,-2"])
def test_a_bad_row_of_a_csv_is_named(tmp_path: Path, row: str) -> None:
    file = write(tmp_path, "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,5,5", row)
    with pytest.raises(TraceError, match="line 3"):
        read_trace(file)


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="jsonl"):
        read_trace("x.parquet")
    with pytest.raises(InvalidRequest, match="can't read"):
        read_trace(str(tmp_path / "none.jsonl"))
    with pytest.raises(InvalidRequest, match="no request"):
        read_trace(write(tmp_path, "empty.jsonl"))


def test_reuse_counts_a_prefix_only_after_it_was_seen(tmp_path: Path) -> None:
    other = GOOD.replace("[1, 2]", "[1, 3]").replace("10,", "20,")
    trace = read_trace(write(tmp_path, "t.jsonl", GOOD, other, GOOD.replace("10,", "30,")))
    assert cached_tokens(trace) == [0, 512, 600]
    found = stats(trace)
    assert found.reuse is not None
    assert found.reuse.token_hit_rate == pytest.approx(1112 / 1800)
    assert found.ratio == pytest.approx(120)


def test_windows_cover_every_request_and_token() -> None:
    trace = read_trace(str(AZURE))
    found = stats(trace, 10.0)
    assert sum(w.requests for w in found.windows) == 300
    assert sum(w.output_tokens for w in found.windows) == sum(r.output_length for r in trace.requests)
    assert found.reuse is None
    assert found.ratio_spread >= 1


def test_a_trace_can_be_cut_sped_up_and_sampled() -> None:
    trace = read_trace(str(AZURE))
    part = trace.between(10.0, 20.0)
    assert all(0 <= r.arrival < 10 for r in part.requests)
    assert trace.faster(2.0).duration == pytest.approx(trace.duration / 2)
    assert trace.sample(50, random.Random(1)) == trace.sample(50, random.Random(1))


def test_adapters_come_with_a_trace_are_kept_and_renumbered_when_files_are_joined(tmp_path: Path) -> None:
    on = GOOD.replace("}", ', "adapter": 3}')
    first, second = (read_trace(write(tmp_path, name, GOOD, on)) for name in ("a.jsonl", "b.jsonl"))
    assert [r.adapter for r in first.requests] == [0, 3]
    assert (first.adapted_share, len(first.adapter_shares)) == (0.5, 1)
    whole = joined([first, second])
    assert sorted(r.adapter for r in whole.requests) == [0, 0, 1, 2]
    again = tmp_path / "again.jsonl"
    again.write_bytes(to_mooncake(whole))
    assert [r.adapter for r in read_trace(str(again)).requests] == [r.adapter for r in whole.requests]
    with pytest.raises(TraceError, match="adapter is -1"):
        read_trace(write(tmp_path, "c.jsonl", on.replace("3}", "-1}")))


def test_requests_years_apart_are_counted_without_a_row_per_second(tmp_path: Path) -> None:
    """A router whose clock was set when it had begun: its first line is of 1970. It took 14 GB."""
    file = write(tmp_path, "t.jsonl", GOOD.replace("10,", "0,"), *[GOOD.replace("10,", "1700000000000,")] * 3)
    arrivals = stats(read_trace(file)).arrivals
    assert (arrivals.duration_s, arrivals.peak_per_second) == (1.7e9, 3)
    assert arrivals.burstiness == pytest.approx(10 / 4)
    nanoseconds = write(tmp_path, "n.jsonl", GOOD.replace("10,", "1700000000000000000,"))
    with pytest.raises(TraceError, match="before the year 10000"):
        read_trace(nanoseconds)


def test_times_of_a_csv_keep_their_zone_and_fraction_and_a_byte_order_mark_is_no_name(tmp_path: Path) -> None:
    rows = ["2024-05-10 02:00:00.5+02:00,1,1", "2024-05-10 00:00:01.2500000+00:00,1,1", "2024-05-10 00:00:02Z,1,1"]
    file = write(tmp_path, "t.csv", "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens", *rows)
    assert [r.arrival for r in read_trace(file).requests] == [0.0, 0.75, 1.5]


def test_windows_that_are_no_minutes_are_told_in_seconds(tmp_path: Path) -> None:
    file = write(tmp_path, "t.jsonl", *(GOOD.replace("10,", f"{ms},") for ms in (0, 40_000, 95_000)))
    told = {
        window: CliRunner().invoke(app, ["trace", "stats", file, "--window", window]).output
        for window in ("30", "60")
    }
    assert all(f" {start} s " in told["30"] for start in (0, 30, 90))
    assert all(f" {start} min " in told["60"] for start in (0, 1))


def test_an_adapter_is_the_same_in_all_files_of_one_router_and_another_after_a_restart(
    tmp_path: Path,
) -> None:
    """A rotated file's adapters were counted a second time, and what they had cached was taken as gone."""
    entropies = iter(count.to_bytes(7, "little") for count in range(1, 9))
    for _ in range(2):  # the second one is the router started again
        recorder = TraceRecorder(
            str(tmp_path / "t.jsonl"), 1 << 20, lambda: 5.0, lambda size: next(entropies)[:size]
        )
        for at in range(3):
            recorder.record(0.0, range(600), 4, b"", "sql@1111111111111111")
            if at == 1:
                recorder.write()
                recorder._rotate()
        recorder.close()
    whole = joined([read_trace(str(tmp_path / name)) for name in ("t.2.jsonl", "t.1.jsonl", "t.jsonl")])
    assert sorted(r.adapter for r in whole.requests) == [1, 1, 1, 2, 2, 2]
    assert sum(cached_tokens(whole)) == 4 * 600
