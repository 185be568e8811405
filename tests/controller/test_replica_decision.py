"""Tests whether to add or remove workers: pure, so each rule and each known failing is a test."""

import msgspec
import pytest

from baton.cluster.advice import RatioPin, TwinError
from baton.controller.pressure import Backlog, Demand, WorkerLimits
from baton.controller.ratio_decision import ControlSettings, History, RatioObservation, decide
from baton.controller.replica_decision import (
    PlannedSlots,
    ReplicaDecision,
    ReplicaHistory,
    ReplicaSettings,
    decide_replicas,
)
from baton.protos.measurements import StepCurve

CURVE = StepCurve(
    fixed=0.03, prefill_token=4e-4, prefill_pair=0.0, decode_sequence=1.25e-3, decode_context_token=0.0
)
WORKERS = WorkerLimits(CURVE, CURVE, chunk_tokens=512, max_batch=8, kv_tokens=131072, ttft_s=1.5, tpot_s=0.06)
HEAVY = Demand(prefill_tokens=7000, pairs=0.0, answers=6, output_tokens=500, context=1200)
LIGHT = Demand(prefill_tokens=200, pairs=0.0, answers=0.2, output_tokens=4, context=500)
NOTHING = Demand(0.0, 0.0, 0.0, 0.0, 0.0)
SETTINGS = ReplicaSettings(most_workers=8)


def look(prefill: int, decode: int, demand: Demand, at: float = 1000.0, **fields) -> RatioObservation:
    return RatioObservation(at, prefill, decode, demand, fields.pop("backlog", Backlog()), WORKERS, **fields)


def placed(prefill: int, decode: int, **fields) -> PlannedSlots:
    return PlannedSlots(prefill, decode, **({"last_prefill": "prefill", "last_decode": "decode"} | fields))


def run(
    looks: list[RatioObservation],
    there: PlannedSlots,
    settings: ReplicaSettings = SETTINGS,
    history: ReplicaHistory = ReplicaHistory(),
) -> tuple[ReplicaDecision, ReplicaHistory]:
    """The last decision, where roles were decided from the same looks."""
    roles = History(changed_at=1000.0)
    for each in looks:
        decided, _ = decide(each, roles, ControlSettings(cooldown_s=1e6))
        found, history = decide_replicas(each, decided, there, history, settings)
    return found, history


def again(count: int, *shape, every: float = 5.0, **fields) -> list[RatioObservation]:
    return [look(*shape, at=1000.0 + every * i, **fields) for i in range(count)]


def test_a_cluster_that_no_ratio_helps_gets_workers() -> None:
    found, _ = run(again(3, 2, 2, HEAVY), placed(2, 2))
    assert found.kind == "add", found
    assert found.prefill + found.decode == 6  # the most that are added at once
    assert found.after == (found.prefill, found.decode)
    assert "every ratio of 4 workers is at least" in found.reason


def test_roles_come_first() -> None:
    skewed = Demand(prefill_tokens=2600, pairs=0.0, answers=2, output_tokens=16, context=1200)
    found, history = run(again(5, 1, 3, skewed), placed(1, 3))
    assert (found.kind, history.times) == ("hold", 0), found


def test_it_is_asked_for_several_times_before_anything_is_added() -> None:
    found, _ = run(again(2, 2, 2, HEAVY), placed(2, 2))
    assert (found.kind, "seen 2 of 3" in found.reason) == ("hold", True), found


def test_never_more_than_the_bound_and_nothing_without_one() -> None:
    found, _ = run(again(3, 2, 2, HEAVY), placed(2, 2), ReplicaSettings(most_workers=5))
    assert found.prefill + found.decode == 5
    full, _ = run(again(3, 2, 2, HEAVY), placed(2, 2), ReplicaSettings(most_workers=4))
    assert (full.kind, "no more than 4 workers" in full.reason) == ("hold", True)
    off, _ = run(again(3, 2, 2, HEAVY), placed(2, 2), ReplicaSettings())
    assert (off.kind, off.reason) == ("hold", "")


def test_never_fewer_than_the_bound_and_too_few_are_made_up() -> None:
    kept, _ = run(again(40, 2, 2, LIGHT), placed(2, 2), ReplicaSettings(most_workers=8, least_workers=4))
    assert kept.kind == "hold"
    found, _ = run(again(1, 1, 1, LIGHT), placed(1, 1), ReplicaSettings(most_workers=8, least_workers=4))
    assert (found.kind, found.prefill, found.decode) == ("add", 2, 2)


def test_what_is_idle_for_long_is_removed_one_by_one_but_not_soon() -> None:
    soon, _ = run(again(11, 4, 4, LIGHT), placed(4, 4))
    assert soon.kind == "hold"
    found, _ = run(again(12, 4, 4, LIGHT), placed(4, 4))
    assert (found.kind, found.prefill + found.decode) == ("remove", 7), found
    assert found.after in ((3, 4), (4, 3))


def test_without_any_traffic_it_shrinks_too() -> None:
    found, _ = run(again(12, 3, 3, NOTHING), placed(3, 3))
    assert found.kind == "remove", found


def test_what_was_added_is_not_thrown_away_at_once() -> None:
    added = ReplicaHistory().changed(1000.0)
    early, _ = run(again(20, 4, 4, LIGHT), placed(4, 4), history=added)
    assert (early.kind, "cool-down" in early.reason) == ("hold", True)
    late, _ = run(again(62, 4, 4, LIGHT), placed(4, 4), history=added)
    assert late.kind == "remove"


def test_queues_keep_workers() -> None:
    waiting = Backlog(waiting=3)
    assert run(again(20, 4, 4, LIGHT, backlog=waiting), placed(4, 4))[0].kind == "hold"


def test_the_last_slot_that_goes_is_judged_by_the_role_that_it_plays_now() -> None:
    """decode-3 reads prompts by now: only the last prefill slot can go, as one reader must stay."""
    found, _ = run(again(12, 1, 4, LIGHT), placed(1, 4, last_prefill="decode", last_decode="prefill"))
    assert (found.kind, found.prefill, found.decode, found.after) == ("remove", 0, 4, (1, 3)), found
    nobody, _ = run(again(12, 1, 1, LIGHT), placed(2, 2), ReplicaSettings(most_workers=8))
    assert nobody.kind == "hold"


def test_it_waits_for_what_was_asked_and_turns_roles_meanwhile() -> None:
    found, history = run(again(9, 2, 2, HEAVY), placed(3, 2, awaited=("prefill-2",)))
    assert (found.kind, found.reason, history.times) == ("hold", "waiting for prefill-2", 0)
    turned, _ = decide(look(1, 3, Demand(2600, 0.0, 2, 16, 1200)), History(), ControlSettings(confirm=1))
    assert turned.kind == "rerole"


def test_what_did_not_come_is_not_asked_for_again_at_once() -> None:
    failed = ReplicaHistory().failed(1000.0)
    found, _ = run(again(20, 2, 2, HEAVY), placed(2, 2), history=failed)
    assert (found.kind, "cool-down" in found.reason) == ("hold", True)


def test_an_operators_numbers_are_left_alone_for_long() -> None:
    asked = ReplicaHistory().changed(1000.0, by_operator=True)
    assert run(again(50, 2, 2, HEAVY), placed(2, 2), history=asked)[0].kind == "hold"
    assert run(again(70, 2, 2, HEAVY), placed(2, 2), history=asked)[0].kind == "add"
    pinned = again(50, 2, 2, HEAVY, pin=RatioPin(2, 2, by="ada"))
    assert run(pinned, placed(2, 2))[0].kind == "hold"


def test_a_start_that_costs_more_than_it_gains_is_not_made() -> None:
    dear = ReplicaHistory(start_s=1e5)
    found, _ = run(again(5, 2, 2, HEAVY), placed(2, 2), history=dear)
    assert (found.kind, "costs" in found.reason) == ("hold", True), found


def test_it_does_not_flap_over_an_hour_of_noise() -> None:
    """A load on the edge of four workers, with noise on it: few changes in 720 looks."""
    prefill, decode, history, changes = 2, 2, ReplicaHistory(), 0
    for i in range(720):
        noise = 1.0 + 0.3 * ((i * 7919 % 13) / 13 - 0.5)
        demand = Demand(2400 * noise, 0.0, 3.0, 170 / noise, 900)
        now = look(prefill, decode, demand, 1000.0 + 5 * i)
        decided, _ = decide(now, History(changed_at=now.at), ControlSettings())
        found, history = decide_replicas(now, decided, placed(prefill, decode), history, SETTINGS)
        if found.kind != "hold":
            prefill, decode, changes, history = *found.after, changes + 1, history.changed(now.at)
    assert changes <= 2, (changes, prefill, decode)


@pytest.mark.parametrize("backlog", [Backlog(40_000, 16, 4), Backlog(40_000, 20, 0)])
def test_with_the_twin_off_queues_that_are_there_add_one_and_nothing_is_removed(backlog: Backlog) -> None:
    off = TwinError(ttft=0.9, bound=0.5, samples=100)
    found, _ = run(again(3, 2, 2, HEAVY, twin=off, backlog=backlog), placed(2, 2))
    assert (found.kind, found.prefill + found.decode) == ("add", 5), found
    assert "off by 90%" in found.reason
    assert run(again(30, 4, 4, LIGHT, twin=off), placed(4, 4))[0].kind == "hold"


def test_what_starts_took_is_remembered() -> None:
    history = ReplicaHistory().started(10.0).started(20.0)
    assert history.start_s == pytest.approx(13.0)


def test_without_cost_curves_nothing_is_added() -> None:
    unknown = [msgspec.structs.replace(each, workers=None) for each in again(5, 2, 2, HEAVY)]
    assert run(unknown, placed(2, 2))[0].kind == "hold"
