"""Tests fetch or compute: decided by measured curves, and said in the decision."""

from __future__ import annotations

from baton.protos.measurements import StepCurve, TransferCurve, WorkerLoad
from baton.router.policies import Option, RoutingDecision, RoutingRequest, load_policy
from baton.router.policies.adjustments.prefix_fetch import best_fetch, uncached, with_fetch
from tests.router.policies.test_policies import snapshot, worker

STEP = StepCurve(1e-3, 1e-4, 1e-9, 1e-3, 1e-8)
QUICK = WorkerLoad(step_curve=STEP, fetch_curve=TransferCurve(1e-3, 1e-9))
SLOW = WorkerLoad(step_curve=STEP, fetch_curve=TransferCurve(1e-3, 1e-5))
D0 = worker("d0", "decode")


def test_blocks_that_are_quicker_to_fetch_are_fetched_from_whoever_holds_most():
    p0, p1 = worker("p0", "prefill", load=QUICK), worker("p1", "prefill", load=QUICK)
    snap = snapshot([p0, p1], [D0])
    fetch = best_fetch(snap, RoutingRequest(1000, 8, {"p0": 10, "p1": 40, "d0": 60}), p0)
    assert fetch is not None
    assert (fetch.source.id, fetch.blocks) == ("d0", 60)
    assert fetch.saved > 0.07  # 800 tokens at 0.1 ms less 50 blocks of 4 KiB


def test_a_slow_link_is_not_used():
    p0 = worker("p0", "prefill", load=SLOW)
    assert best_fetch(snapshot([p0], [D0]), RoutingRequest(1000, 8, {"d0": 60}), p0) is None


def test_handoffs_tell_the_speed_until_something_was_fetched():
    load = WorkerLoad(step_curve=STEP, transfer_curve=TransferCurve(1e-3, 1e-5))
    p0 = worker("p0", "prefill", load=load)
    assert best_fetch(snapshot([p0], [D0]), RoutingRequest(1000, 8, {"d0": 60}), p0) is None


def test_nothing_is_fetched_that_is_here_or_nowhere_or_of_other_weights():
    p0, other = worker("p0", "prefill", load=QUICK), worker("d0", "decode", fingerprint="g")
    assert best_fetch(snapshot([p0], [D0]), RoutingRequest(1000, 8, {"p0": 60, "d0": 60}), p0) is None
    assert best_fetch(snapshot([p0], [D0]), RoutingRequest(1000, 8, {}), p0) is None
    assert best_fetch(snapshot([p0], [other]), RoutingRequest(1000, 8, {"d0": 60}), p0) is None


def test_one_token_is_always_left_to_compute():
    p0 = worker("p0", "prefill", load=QUICK)
    fetch = best_fetch(snapshot([p0], [D0]), RoutingRequest(160, 8, {"d0": 10}), p0)
    assert fetch is not None
    assert fetch.blocks == 9


def test_every_policys_decision_says_the_fetch_and_counts_what_is_left():
    snap = snapshot([worker("p0", "prefill", load=QUICK)], [D0], local_max_tokens=0)
    ask = RoutingRequest(1000, 8, {"d0": 60})
    for name in ("cost", "least_loaded", "round_robin"):
        decision = load_policy(name)(snap, ask)
        assert decision is not None
        taken = with_fetch(snap, ask, decision).taken
        assert (taken.fetch_from, taken.fetch_address, taken.fetch_blocks) == ("d0", "a:1", 60)
        assert uncached(ask, taken) == 40
        assert 0.1 <= taken.fetch_limit_s < 0.11  # what the 960 tokens would take to compute


def test_the_local_way_fetches_nothing():
    snap = snapshot(
        [
            worker(
                "p0",
                "prefill",
                load=QUICK,
            )
        ],
        [D0],
    )
    decision = RoutingDecision("x", Option("local", "d0"))
    assert with_fetch(snap, RoutingRequest(100, 8, {"p0": 5}), decision) is decision


def test_cost_may_take_an_idle_worker_that_fetches_over_a_busy_one_that_holds():
    busy = worker("p1", "prefill", load=QUICK, pending_prompts=1, pending_tokens=2000)
    snap = snapshot([worker("p0", "prefill", load=QUICK), busy], [D0])
    decision = load_policy("cost")(snap, RoutingRequest(4000, 64, {"p1": 243}))
    assert decision is not None
    assert decision.taken.prefill == "p0"
    assert decision.taken.terms["read"] < 0.05


def test_a_reader_that_has_computed_nothing_yet_waits_for_a_fetch_until_it_stalls():
    snap = snapshot([worker("p0", "prefill", load=WorkerLoad())], [D0], local_max_tokens=0)
    ask = RoutingRequest(20_000, 8, {"d0": 1_249})
    decision = load_policy("least_loaded")(snap, ask)
    assert decision is not None
    assert with_fetch(snap, ask, decision).taken.fetch_limit_s >= 2.0
