"""Readers of Mooncake JSONL and Azure CSV, and what is said of a trace."""

import random
from pathlib import Path

import pytest

from baton.planner.traces.stats import cached_tokens, stats
from baton.planner.traces.trace import TraceError, joined, read_trace, to_mooncake
from baton.protos.errors import InvalidRequest

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
