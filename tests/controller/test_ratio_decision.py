"""Tests the controller's decisions: pure, so every failing of controllers elsewhere is a test here."""

from itertools import pairwise

import msgspec
import pytest

from baton.cluster.advice import RatioPin, TwinError
from baton.controller.pressure import Backlog, Demand, WorkerLimits, capacity, every_ratio
from baton.controller.ratio_decision import ControlSettings, History, RatioObservation, decide
from baton.protos.measurements import StepCurve

CURVE = StepCurve(
    fixed=0.03, prefill_token=4e-4, prefill_pair=0.0, decode_sequence=1.25e-3, decode_context_token=0.0
)
WORKERS = WorkerLimits(CURVE, CURVE, chunk_tokens=512, max_batch=8, kv_tokens=131072, ttft_s=1.5, tpot_s=0.06)
READING = Demand(prefill_tokens=10200, pairs=0.0, answers=8.5, output_tokens=68, context=1200)
WRITING = Demand(prefill_tokens=640, pairs=0.0, answers=10, output_tokens=1000, context=110)
LIGHT = Demand(prefill_tokens=1000, pairs=0.0, answers=1, output_tokens=20, context=500)
SETTINGS = ControlSettings()


def look(prefill: int, decode: int, demand: Demand, at: float = 1000.0, **fields) -> RatioObservation:
    return RatioObservation(at, prefill, decode, demand, fields.pop("backlog", Backlog()), WORKERS, **fields)


def run(looks: list[RatioObservation], settings: ControlSettings = SETTINGS, history: History = History()):
    """The last decision and what is remembered."""
    for each in looks:
        decision, history = decide(each, history, settings)
    return decision, history


@pytest.mark.parametrize(
    ("demand", "prefill", "towards"), [(READING, 3, 1), (WRITING, 5, -1), (READING, 6, 0), (WRITING, 2, 0)]
)
def test_it_turns_towards_the_role_that_is_short(demand, prefill, towards):
    looks = [look(prefill, 8 - prefill, demand, 1000 + 5 * i) for i in range(3)]
    decision, _ = run(looks)
    moved = decision.prefill - prefill
    assert (moved > 0) - (moved < 0) == towards, decision


def test_a_ratio_that_carries_the_load_is_left_alone_though_another_is_better():
    decision, _ = run([look(1, 7, LIGHT, 1000 + 5 * i) for i in range(5)])
    assert (decision.kind, "enough room" in decision.reason) == ("hold", True), decision
    assert decision.best == (1, 7), "nothing is recommended that nobody needs"


def test_one_look_is_not_believed_unless_it_is_far_off():
    once, _ = run([look(5, 3, WRITING)])
    assert (once.kind, "seen 1 of 2" in once.reason) == ("hold", True), once
    twice, _ = run([look(5, 3, WRITING), look(5, 3, WRITING, 1005)])
    assert twice.kind == "rerole"
    far, _ = run([look(1, 7, READING)])
    assert far.kind == "rerole", far


def test_no_more_than_so_many_workers_change_at_once():
    far, _ = run([look(1, 7, READING)])
    assert (far.prefill, far.decode) == (5, 3)  # twice what is usual, as it is far off
    near, _ = run([look(4, 4, READING, 1000 + 5 * i) for i in range(2)])
    assert (near.prefill, near.decode) == (6, 2)


def test_going_on_the_same_way_waits_half_as_long_when_it_is_far_off():
    onwards, back = History().changed(1000.0, 2, 0.2), History().changed(1000.0, -2, 0.2)
    assert decide(look(2, 6, READING, 1006), onwards, SETTINGS)[0].kind == "rerole"
    assert "cool-down" in decide(look(2, 6, READING, 1006), back, SETTINGS)[0].reason


def test_it_waits_after_a_change_and_then_goes_on():
    changed = History().changed(1000.0, 2, 0.2)
    early, history = decide(look(3, 5, READING, 1005), changed, SETTINGS)
    assert (early.kind, "cool-down" in early.reason) == ("hold", True), early
    later, _ = run([look(3, 5, READING, 1010), look(3, 5, READING, 1015)], history=history)
    assert later.kind == "rerole"


def test_it_does_not_flap_between_two_ratios():
    """A load on the edge, with noise on it: over ten minutes there are few changes."""
    prefill, history, changes = 5, History(), 0
    for i in range(120):
        noise = 1.0 + (0.06 if i % 2 else -0.06)
        demand = Demand(8700 * noise, 0.0, 7.2, 560 / noise, 1200)
        decision, history = decide(look(prefill, 8 - prefill, demand, 1000 + 5 * i), history, SETTINGS)
        if decision.kind == "rerole":
            history = history.changed(1000 + 5 * i, decision.prefill - prefill, 0.2)
            prefill, changes = decision.prefill, changes + 1
    assert changes <= 2


def test_queues_count_as_work():
    """The failing of a controller that is blind to queues: what arrives fits, what waits doesn't."""
    calm = Demand(2800, 0.0, 2.3, 19, 1200)
    assert run([look(2, 6, calm, 1000 + 5 * i) for i in range(3)])[0].kind == "hold"
    waiting = Backlog(prefill_tokens=200_000)
    decision, _ = run([look(2, 6, calm, 1000 + 5 * i, backlog=waiting) for i in range(3)])
    assert (decision.kind, decision.prefill > 2) == ("rerole", True), decision


def test_a_queue_in_routers_is_work_of_both_roles_and_changes_no_ratio_that_fits_the_demand():
    best = {
        min(every_ratio(READING, Backlog(0, 0, 0, n, n * 1200.0, full), WORKERS, 8, 30.0), key=lambda p: p.worst)
        for n in (0, 100, 10_000)
        for full in (False, True)
    }
    assert {p.prefill_workers for p in best} == {6}
    assert max(p.worst for p in best) > 10 * min(p.worst for p in best)


def test_each_change_that_is_turned_back_makes_the_next_one_harder():
    settings, history, prefill, at = msgspec.structs.replace(SETTINGS, cooldown_s=0.0), History(), 5, 1000.0
    looks = []
    for demand, at_last in ((WRITING, 3), (READING, 5), (WRITING, 3), (READING, 5), (WRITING, 3)):
        looks.append(0)
        while prefill != at_last:
            at, looks[-1] = at + 5, looks[-1] + 1
            decision, history = decide(look(prefill, 8 - prefill, demand, at), history, settings)
            if decision.kind == "rerole":
                history, prefill = history.changed(at, decision.prefill - prefill, 0.2), decision.prefill
                break
    assert looks == [2, 4, 8, 16, 32], looks


def test_answers_that_run_count_before_one_of_them_has_ended():
    unknown = Demand(640, 0.0, 10, 0.0, 110)  # nobody knows yet how long these answers will be
    decision, _ = run([look(6, 2, unknown, backlog=Backlog(running=16, waiting=30))])
    assert (decision.kind, decision.decode > 2) == ("rerole", True), decision


def test_a_pin_is_honoured():
    decision, _ = run([look(1, 7, READING, pin=RatioPin(1, 7, by="ada"))] * 4)
    assert (decision.kind, "pinned at 1:7 by ada" in decision.reason) == ("hold", True)


def test_nothing_is_decided_while_a_change_is_under_way():
    assert run([look(1, 7, READING, pending=True)] * 4)[0].kind == "hold"


@pytest.mark.parametrize("prefill", [1, 4, 7])
def test_no_traffic_no_curves_or_no_choice_means_hold(prefill):
    nothing = Demand(0.0, 0.0, 0.0, 0.0, 0.0)
    assert decide(look(prefill, 8 - prefill, nothing), History(), SETTINGS)[0].reason == "no traffic"
    unmeasured = msgspec.structs.replace(look(prefill, 8 - prefill, READING), workers=None)
    assert decide(unmeasured, History(), SETTINGS)[0].withheld == "no cost curves"
    assert "no choice" in decide(look(0, 1, READING), History(), SETTINGS)[0].reason


def test_advice_is_withheld_when_the_twin_is_off_and_then_only_queues_speak():
    off = TwinError(ttft=0.9, tpot=0.1, bound=0.5, samples=100)
    decision, _ = run([look(3, 5, READING, 1000 + 5 * i, twin=off) for i in range(4)])
    assert (decision.kind, decision.best) == ("hold", None)
    assert "off by 90%" in decision.withheld
    waiting = Backlog(prefill_tokens=40_000)
    moved, _ = run([look(3, 5, READING, 1000 + 5 * i, twin=off, backlog=waiting) for i in range(4)])
    assert (moved.kind, moved.prefill) == ("rerole", 4), moved
    assert "by the queues alone" in moved.reason


def test_a_few_samples_are_no_verdict_on_the_twin():
    young = TwinError(ttft=5.0, bound=0.5, samples=3)
    assert run([look(1, 7, READING, twin=young)])[0].withheld == ""


def test_the_reason_for_staying_is_the_rule_that_holds_it():
    """Many workers, most of which are too few: a worker more relieves little, though it would do much work."""
    demand = Demand(60_000.0, 0.0, 50.0, 2000.0, 1200)
    decision, _ = run([look(19, 13, demand, 1000 + 5 * i) for i in range(3)])
    assert decision.kind == "hold"
    assert "less, and a change must bring 10%" in decision.reason, decision
    nobody_decodes, _ = decide(look(2, 0, demand), History(), SETTINGS)
    assert "no decode worker" in nobody_decodes.reason


def test_a_change_that_costs_more_than_it_gains_is_not_made():
    dear = History(change_s=500.0)
    decision, _ = run([look(4, 4, READING, 1000 + 5 * i) for i in range(4)], history=dear)
    assert (decision.kind, "costs" in decision.reason) == ("hold", True), decision


def test_pressure_falls_on_the_role_that_gets_a_worker():
    table = every_ratio(READING, Backlog(), WORKERS, 8, 30.0)
    assert [p.prefill_workers for p in table] == list(range(1, 8))
    assert all(a.prefill > b.prefill and a.decode <= b.decode for a, b in pairwise(table))


def test_a_decode_worker_carries_what_its_step_can_within_the_slo():
    assert capacity(WORKERS, 100) == pytest.approx(8 / 0.04)  # the seats are what ends it
    tight = msgspec.structs.replace(WORKERS, tpot_s=0.0375)
    assert capacity(tight, 100) == pytest.approx(6 / 0.0375)
    small = msgspec.structs.replace(WORKERS, kv_tokens=4000)
    assert capacity(small, 900) == pytest.approx(4 / 0.035)


@pytest.mark.parametrize(("prefill", "decode", "after"), [(0, 2, (1, 1)), (2, 0, (1, 1))])
def test_a_role_that_nobody_plays_is_played_again_by_one_that_was_planned_for_it(prefill, decode, after):
    """A worker that is gone is not one that was turned: its role is waited for."""
    looks = [look(prefill, decode, LIGHT, 1000 + 5 * i, strayed=1) for i in range(2)]
    assert "seen 1 of 2" in run(looks[:1])[0].reason
    turned, _ = run(looks)
    assert (turned.kind, turned.prefill, turned.decode) == ("rerole", *after), turned
    pinned, _ = run([msgspec.structs.replace(each, pin=RatioPin(prefill, decode)) for each in looks])
    assert (pinned.kind, "pinned" in pinned.reason) == ("hold", True), pinned
    gone, _ = run([msgspec.structs.replace(each, strayed=0) for each in looks])
    assert gone.kind == "hold", gone
