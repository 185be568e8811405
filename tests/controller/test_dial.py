"""Tests the live dial: what is observed, how far the twin is off, and the ratios simulated from recent traffic."""

import random
import subprocess
import sys

import msgspec
import pytest

from baton.cluster.traffic import ClassTraffic, PredictedAnswer, ServedRequest, TrafficSlice
from baton.controller import observation as observe
from baton.controller.dial import DialAnswer, DialQuestion, answer
from baton.controller.pressure import Backlog, every_ratio
from baton.controller.twin_error import twin_error
from baton.protos.measurements import AdapterCurve, StepCurve, TransferCurve, WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo
from tests.controller.test_ratio_decision import WORKERS
from tests.thorough import first_now

LAYOUT = KvLayout("bfloat16", (), 1024, "bfloat16")


def worker(name: str, role: str, **load) -> observe.ObservedWorker:
    info = WorkerInfo(name, name, role, "", "m", "", LAYOUT, 8192, 1000, (), 512, max_batch=8)
    return observe.ObservedWorker(info, WorkerLoad(**load))


def served(count: int, seconds: float, prompt: int, outputs: int) -> tuple[ServedRequest, ...]:
    rng = random.Random(1)
    return tuple(ServedRequest(1e9 + rng.uniform(0, seconds), prompt, outputs, 0) for _ in range(count))


def ask(requests: tuple[ServedRequest, ...]) -> DialQuestion:
    return DialQuestion(8, WORKERS, TransferCurve(5e-4, 0.0), 64, requests)


@pytest.mark.parametrize(("prompt", "outputs", "rate"), first_now([(64, 100, 10.0), (1200, 8, 8.5)]))
def test_the_simulated_dial_and_the_pressures_agree_on_the_side(prompt, outputs, rate):
    found = answer(ask(served(int(rate * 30), 30, prompt, outputs)))
    assert found is not None
    assert [(p.prefill, p.decode) for p in found.points] == [(i, 8 - i) for i in range(1, 8)]
    traffic = ClassTraffic(
        int(10 * rate), int(10 * rate * prompt), 100, 100 * prompt, 0, 0.0, 100 * outputs, 100.0 * outputs * prompt
    )
    slices = [TrafficSlice("r", 0, 10.0, {"c": traffic})]
    demand = observe.demand(slices, slices)
    best = min(every_ratio(demand, Backlog(), WORKERS, 8, 30.0), key=lambda p: p.worst)
    at_best = next(p for p in found.points if p.prefill == best.prefill_workers)
    most = max(p.goodput for p in found.points)
    assert at_best.goodput >= 0.95 * most, (best, found)


def test_the_dial_runs_as_a_process_of_its_own():
    asked = ask(served(60, 20, 600, 10))
    done = subprocess.run(
        [sys.executable, "-m", "baton.controller.dial"],
        input=msgspec.json.encode(asked),
        capture_output=True,
        check=True,
    )
    assert msgspec.json.decode(done.stdout, type=DialAnswer | None) == answer(asked)


def test_the_dial_adds_what_adapters_cost_by_the_recent_requests_on_them():
    plain = ask(served(60, 20, 200, 20))
    on = tuple(msgspec.structs.replace(s, adapter=1 + i % 3) for i, s in enumerate(plain.served))
    dear = observe.AdaptedSteps(WORKERS.decode, AdapterCurve(0.0, 0.02 / 8, 8.0))
    without, bare, seen = (
        answer(msgspec.structs.replace(plain, served=one, decode_adapters=cost))
        for one, cost in ((on, None), (plain.served, dear), (on, dear))
    )
    assert bare.points == without.points  # nobody is on an adapter
    slower = [b.tpot_p99_s - a.tpot_p99_s for a, b in zip(without.points, seen.points, strict=True)]
    assert min(slower) > 0.005, "each step has an adapter or more, at 20 ms each"


def test_what_adapters_cost_is_the_mean_of_the_roles_workers_that_saw_some():
    bare, curve = StepCurve(1.0, 0.0, 0.0, 0.0, 0.0), AdapterCurve(1.0, 2.0, 8.0)
    other = AdapterCurve(3.0, 4.0, 16.0)
    workers = [
        worker("d0", "decode", bare_curve=bare, adapter_curve=curve),
        worker("d1", "decode", bare_curve=bare, adapter_curve=other),
        worker("d2", "decode"),
    ]
    assert observe.adapted_steps(workers, "decode") == observe.AdaptedSteps(bare, AdapterCurve(2.0, 3.0, 12.0))
    assert observe.adapted_steps(workers, "prefill") is None


def test_too_little_traffic_gives_no_dial():
    assert answer(ask(served(3, 5, 100, 5))) is None


def test_demand_is_what_arrives_in_the_shape_of_what_ended():
    ended = ClassTraffic(0, 0, 10, 10_000, 2_500, 4_000.0, 500, 500 * 900.0)
    now = [
        TrafficSlice("a", 5, 1.0, {"c": ClassTraffic(arrived=4, arrived_tokens=4000)}),
        TrafficSlice("b", 5, 1.0, {}),
    ]
    found = observe.demand(now, [*now, TrafficSlice("a", 1, 1.0, {"c": ended})])
    assert (found.answers, found.prefill_tokens, found.output_tokens) == (4, 3000, 200)
    assert found.context == 900


def test_a_router_that_took_anothers_place_doubles_no_demand():
    """Each of them covers half of the window; together they cover all of it."""
    one = {"c": ClassTraffic(arrived=2, arrived_tokens=200)}
    before = [TrafficSlice("a", float(at), 1.0, one) for at in range(1, 11)]
    after = [TrafficSlice("b", float(at), 1.0, one) for at in range(11, 21)]
    beside = [TrafficSlice("c", float(at), 1.0, {}) for at in range(6, 16)]
    assert observe.covered([*before, *beside, *after]) == 20.0
    assert observe.demand([*before, *beside, *after], []).answers == 2.0


def test_what_waits_in_routers_is_apart_from_what_waits_at_workers_and_says_which_role_it_waits_for():
    slices = [TrafficSlice("a", 10, 1.0, {}, waiting=5, waiting_tokens=5000)]
    reading = [worker("p", "prefill", waiting_tokens=4096), worker("d", "decode", running=1)]
    found = observe.backlog(reading, slices, 10.5)
    assert found == Backlog(4096, 1, 0, 5, 5000)
    assert (found.unread_tokens, found.unseated) == (9096, 0)
    writing = [worker("p", "prefill", waiting_tokens=0), worker("d", "decode", running=8)]
    found = observe.backlog(writing, slices, 10.5)
    assert found == Backlog(0, 8, 0, 5, 5000, decode_full=True)
    assert (found.unread_tokens, found.unseated) == (0, 5)
    old = observe.backlog(writing, slices, 60.0)  # an old word on a queue
    assert (old.queued, old.unseated) == (0, 0)
    held = [worker("p", "prefill", waiting_tokens=100), worker("d", "decode", running=2, leased_pages=500)]
    assert not observe.backlog(held, slices, 10.5).decode_full  # its seats wait for prompts to be read


def test_costs_come_from_the_role_that_measured_them():
    mine, other = StepCurve(1.0, 2.0, 0.0, 0.0, 0.0), StepCurve(3.0, 0.0, 0.0, 4.0, 0.0)
    workers = [worker("p", "prefill", step_curve=mine), worker("d", "decode", step_curve=other)]
    found = observe.costs(workers, 512, 1.0, 0.1, 100.0)
    assert (found.prefill, found.decode, found.kv_tokens) == (mine, other, 512 * 16)
    assert observe.costs([worker("p", "prefill")], 512, 1.0, 0.1, 100.0) is None


def test_the_twin_is_off_by_the_difference_of_medians():
    twins = [PredictedAnswer(0.2, 0.25, 0.03, 0.03)] * 10 + [PredictedAnswer(0.2, 90.0, 0.03, 0.03)]
    found = twin_error(twins, 1.0, 0.06, 0.5, predicted_rate=110.0, observed_rate=100.0)
    assert (found.ttft, found.tpot, found.throughput) == (pytest.approx(-0.2), 0.0, pytest.approx(0.1))
    assert (found.samples, found.worst) == (11, pytest.approx(0.2))


def test_a_difference_that_is_nothing_beside_the_slo_is_no_error():
    assert twin_error([PredictedAnswer(0.001, 0.003, None, None)], 2.0, 0.1, 0.5).ttft == pytest.approx(-0.02)
    assert twin_error([], 2.0, 0.1, 0.5).worst is None
