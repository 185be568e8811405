"""The benchmarks of the ratio: what is asked is the same for every run, and a whole small run goes through."""

import json

import msgspec
import pytest

from baton.cluster.config import WorkerConfig
from baton.cost.profiles import Overhead
from baton.planner.costs.worker import from_curve, from_paced
from baton.planner.score import Slo, tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.sweep import ratio_name
from baton.planner.traces.trace import Trace, TraceRequest, read_trace
from baton.protos.measurements import StepCurve, TransferCurve
from bench import flip, rerole, sim_vs_cpu, sim_vs_paced
from bench.own_time import ANSWER, PROMPT, split
from bench.paced_load import Answered, Arrival
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


@pytest.mark.thorough
def test_the_held_out_half_is_not_what_was_chosen_on():
    trace = read_trace(TRACE).faster(3)
    first, second = halves(trace)
    assert len(first.requests) + len(second.requests) == len(trace.requests)
    found = held_out(trace, "roofline:llama-3-70b@a800x8", 4, Slo(10.0, 0.1))
    assert found.requests == (len(first.requests), len(second.requests))
    assert 0.0 <= found.lost <= 1.0
    assert found.good[ratio_name(*found.best)] == max(found.good.values()) > 0
    assert len(found.good) == 4  # three ratios, and colocated


def test_what_is_left_of_a_lone_requests_time_is_its_own(tmp_path):
    profile = tmp_path / "p.toml"
    profile.write_text(sim_vs_paced.profile_text(1.0))
    costs = from_paced(str(profile))
    told = msgspec.structs.replace(costs, overhead=Overhead(0.005, 0.003, 0.001))
    settings = SimSettings(1, 1, max_batch=16, stepwise=True)
    sim = ClusterSim(ClusterScenario(settings, told, told, Trace("one", (TraceRequest(0.0, PROMPT, ANSWER),))))
    sim.run()
    lone = Answered(0, ttft(sim.flights[0]), tpot(sim.flights[0]))
    found = split(0.003, [lone] * 3, costs)
    assert msgspec.structs.astuple(found) == pytest.approx((0.005, 0.003, 0.001), abs=1e-6)


def test_a_change_of_role_is_in_time_when_the_slowest_was_and_no_request_failed(capsys):
    changes = [rerole.Change("decode-0", "prefill", s, s) for s in (0.1, 1.9)]
    good = Answered(0, 0.5, 0.05)
    assert rerole.outcome("m", changes, [good]).reached
    assert not rerole.outcome("m", changes, [good, Answered(0, None, None)]).reached
    assert not rerole.outcome("m", [rerole.Change("decode-0", "prefill", 2.1, 2.1)], [good]).reached
    assert "failed: too late" in capsys.readouterr().err


def test_what_a_request_alone_took_beyond_its_steps_and_its_transfer_is_its_own():
    curve, chunk = StepCurve(0.01, 1e-3, 0.0, 2e-3, 0.0), WorkerConfig().prefill_chunk_tokens
    worker = from_curve("a worker", curve, 65536, 64, TransferCurve(0.002, 1e-6))
    assert sim_vs_cpu.reading(worker, 100) == pytest.approx(0.11)
    assert sim_vs_cpu.reading(worker, chunk + 1) == pytest.approx(0.02 + 1e-3 * (chunk + 1))
    assert sim_vs_cpu.shipping(worker, chunk + 1) == pytest.approx(0.002 + 64e-6)
    alone = 0.11 + 0.002 + 100 * 64e-6
    asked = [(Arrival(0.0, 0, 100, 20), Answered(0, alone + own, 0.0125)) for own in (0.004, 0.005, 0.9)]
    found = sim_vs_cpu.overhead(worker, worker, asked)
    assert (found.request, found.handoff, found.step) == (pytest.approx(0.005), 0.0, pytest.approx(0.0005))


def test_only_words_are_asked_of_random_weights():
    found = sim_vs_cpu.Vocabulary.of(sim_vs_cpu.DEMO)
    assert found.size == 4096
    assert len(found.words) == sim_vs_cpu.WORDS


def test_many_processes_on_few_cores_are_run_slower():
    assert [sim_vs_paced.slowness(n, n, 2) for n in (1, 2, 4, 8)] == [1, 1, 2, 3]
    assert sim_vs_paced.slowness(8, 8, 64) == 1
    assert "fixed = 0.08" in sim_vs_paced.profile_text(2.0)


def test_a_report_says_what_was_missed_and_fails(tmp_path, capsys):
    seen = dict.fromkeys(sim_vs_paced.TARGETS, 1.0)
    rows = [
        sim_vs_paced.Row("even", "1:1", 9, 0, seen, seen),
        sim_vs_paced.Row("even", "8:8", 9, 0, seen, seen | {"ttft p50": 1.15, "ttft p99": 1.15}),
    ]
    assert sim_vs_paced.report(rows[:1], None) == 0
    assert sim_vs_paced.report(rows, str(tmp_path / "r.json"), seconds=1.0) == 1
    assert "even 8:8 ttft p50 +15.0%" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert [row["missed"] for row in found["rows"]] == [[], ["ttft p50"]]
    assert found["targets"]["ttft p99"] == 0.2


@pytest.mark.soak
def test_a_small_comparison_of_simulator_and_engine_goes_through(tmp_path):
    rows = list(sim_vs_paced.run(tmp_path, ["even", "long answers"], 1, 1, 5.0, 1))
    assert [row.load for row in rows] == ["even", "long answers"]
    assert not any(row.failed for row in rows)
    assert all(set(row.errors) == {"ttft p50", "ttft p99", "tpot p50", "tpot p99"} for row in rows)
