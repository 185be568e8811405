"""Runs of the simulated cluster: fixed seeds hold, a seed repeats to the byte, a failing scenario is made small."""

from __future__ import annotations

import msgspec
import pytest

from baton.drill.run import play, shrink
from baton.drill.scenario import FAULTS, Fault, Scenario, Size, draw

SEEDS = (1, 2, 3, 12)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_invariant_holds_under_faults_of_every_kind(seed: int) -> None:
    verdict = play(draw(seed))
    assert verdict.held, verdict.violations
    assert verdict.answered + verdict.failed + verdict.cancelled > 0


def test_a_seed_gives_the_same_story_to_the_byte() -> None:
    first, second = (play(draw(2), keep_story=True) for _ in range(2))
    assert first.lines == second.lines
    assert (first.digest, first.turns) == (second.digest, second.turns)
    assert play(draw(6, Size(1, 2))).digest != first.digest


def test_requests_go_on_elsewhere_when_every_worker_dies_in_turn() -> None:
    quiet = draw(8, Size(workers=2, requests=12, kinds=()))
    slots = [f"prefill-{i}" for i in range(quiet.prefill)] + [f"decode-{i}" for i in range(quiet.decode)]
    kills = tuple(Fault("kill", 0.3 + 0.9 * i, slot) for i, slot in enumerate(slots))
    verdict = play(msgspec.structs.replace(quiet, faults=kills))
    assert verdict.held, verdict.violations
    assert verdict.answered > 0


def test_a_scenario_survives_being_written_down() -> None:
    scenario = draw(21, Size(workers=1, requests=5))
    again = msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario)
    assert again == scenario
    assert play(again).digest == play(scenario).digest


def test_what_fails_is_made_as_small_as_it_still_fails() -> None:
    scenario = draw(4, Size(requests=30, faults=12))
    needed = {scenario.requests[3].number, scenario.requests[-1].number}
    small = shrink(scenario, lambda tried: needed <= {r.number for r in tried.requests})
    assert {r.number for r in small.requests} == needed
    assert small.faults == ()


def test_many_seeds_draw_every_kind_of_fault() -> None:
    drawn = {fault.kind for seed in range(60) for fault in draw(seed).faults}
    assert drawn == set(FAULTS)
