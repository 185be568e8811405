"""Simulated clusters of which more is asked than there is room for."""

from __future__ import annotations

import msgspec
import pytest

from baton.drill.draw import draw
from baton.drill.run import play
from baton.drill.scenario import Size
from tests.thorough import first_now

OVERLOADED = Size(overloaded=1.0)
DIRECT, RATED, HURRIED = 7, 2, 9  # seeds: small queues of two models, calls with keys, requests with SLOs
URGENT, SLOW = 5, 68  # seeds: requests of several priorities, and two models of which one is slow
FEW_BYTES = 6  # a seed of which requests may hold few bytes


@pytest.mark.parametrize("seed", first_now((DIRECT, RATED, HURRIED)))
def test_full_queues_refuse_what_they_may_and_share_their_places(seed: int) -> None:
    verdict = play(draw(seed, OVERLOADED))
    assert verdict.held, verdict.violations
    assert verdict.refused > 20
    assert verdict.answered > 20


@pytest.mark.thorough  # of a seed of all faults: tests/drill/test_run.py
def test_an_overloaded_seed_gives_the_same_story_to_the_byte() -> None:
    scenario = draw(RATED, OVERLOADED)
    scenario = msgspec.structs.replace(scenario, requests=scenario.requests[:60])
    first, second = play(scenario), play(scenario)
    assert (first.digest, first.turns) == (second.digest, second.turns)


def test_a_share_of_the_seeds_is_overloaded_and_queues_of_others_have_few_places() -> None:
    drawn = [draw(seed) for seed in range(200)]
    overloaded = [scenario for scenario in drawn if scenario.tenants]
    assert 8 <= len(overloaded) <= 35
    assert {scenario.models for scenario in overloaded} == {1, 2}
    assert {bool(scenario.keys) for scenario in overloaded} == {True, False}
    assert any(request.slo_ttft_s for scenario in overloaded for request in scenario.requests)
    assert any(scenario.max_queue < 20 and scenario.faults for scenario in drawn)
    assert {bool(scenario.batches) for scenario in overloaded} == {True, False}
    assert any(scenario.max_inflight_bytes < 1 << 20 and scenario.faults for scenario in drawn)
    assert not draw(0, Size(narrow=0.0, overloaded=0.0)).tenants


def test_requests_of_a_share_of_the_seeds_have_priorities_and_a_key_makes_none_more_urgent() -> None:
    drawn = [draw(seed, Size(ordered=0.5, http=0.5, keyed=0.5)) for seed in range(100)]
    ordered = [scenario for scenario in drawn if any(request.priority for request in scenario.requests)]
    assert 20 < len(ordered) < 60
    with_keys = [request for scenario in ordered if scenario.keys for request in scenario.requests]
    assert {request.priority < 0 for request in with_keys if request.over_http} == {False}
    assert not any(request.priority for request in with_keys if request.responses or request.over_grpc)


def test_a_router_whose_requests_may_hold_few_bytes_refuses_no_more_than_it_must() -> None:
    verdict = play(draw(FEW_BYTES, Size(overloaded=0.0, flooded=0.0, http=0.0, tight=1.0)))
    assert verdict.held, verdict.violations
    assert verdict.refused


def test_one_of_two_models_is_slow_in_some_runs_and_some_requests_are_more_urgent() -> None:
    drawn = [draw(seed, OVERLOADED) for seed in range(100)]
    assert 10 <= sum(len(scenario.paces) == 2 for scenario in drawn) <= 50
    assert all(scenario.models == 2 for scenario in drawn if scenario.paces)
    assert 10 <= sum(any(r.priority for r in scenario.requests if r.tenant) for scenario in drawn) <= 50


@pytest.mark.parametrize("seed", first_now((URGENT, SLOW)))
def test_urgent_requests_go_first_and_a_slow_model_holds_up_its_own_alone(seed: int) -> None:
    verdict = play(draw(seed, OVERLOADED))
    assert verdict.held, verdict.violations
    assert verdict.refused > 20
