"""The benchmarks of the ratio: what is asked is the same for every run, and a whole small run goes through."""

import pytest

from baton.planner.score import Slo
from baton.planner.sweep import ratio_name
from baton.planner.traces import read_trace
from bench import flip, sim_vs_paced
from bench.paced_load import Answered
from bench.plan_heldout import halves, held_out

TRACE = "tests/data/mooncake_conversation_400.jsonl"


def test_the_flip_is_the_same_load_for_every_ratio_and_it_flips():
    load = flip.arrivals(5.0, 8, seed=3)
    assert load == flip.arrivals(5.0, 8, seed=3)
    assert [a.at for a in load] == sorted(a.at for a in load)
    middle = [a for a in load if a.phase == 1]
    assert {a.answer for a in middle} == {flip.DECODE_HEAVY.answer}
    assert max(a.prompt for a in middle) < min(a.prompt for a in load if a.phase != 1)


def test_good_needs_both_slos_and_an_answer():
    good = Answered(0, 1.0, 0.05)
    bad = [Answered(0, 1.6, 0.05), Answered(0, 1.0, 0.07), Answered(0, None, None), Answered(0, 1.0, 0.05, "error")]
    assert flip.is_good(good)
    assert not any(flip.is_good(b) for b in bad)


def test_the_held_out_half_is_not_what_was_chosen_on():
    trace = read_trace(TRACE).faster(3)
    first, second = halves(trace)
    assert len(first.requests) + len(second.requests) == len(trace.requests)
    found = held_out(trace, "roofline:llama-3-70b@a800x8", 4, Slo(10.0, 0.1))
    assert found.requests == (len(first.requests), len(second.requests))
    assert 0.0 <= found.lost <= 1.0
    assert found.goodput[ratio_name(*found.best)] == max(found.goodput.values())
    assert len(found.goodput) == 4  # three ratios, and colocated


@pytest.mark.soak
def test_a_small_comparison_of_simulator_and_engine_goes_through(tmp_path):
    profile = tmp_path / "p.toml"
    profile.write_text(sim_vs_paced.PROFILE)
    rows = list(sim_vs_paced.run(str(profile), ["even", "long answers"], 1, 1, 5.0, 1))
    assert [row.load for row in rows] == ["even", "long answers"]
    assert not any(row.failed for row in rows)
    assert all(set(row.errors) == {"ttft p50", "ttft p99", "tpot p50", "tpot p99"} for row in rows)
