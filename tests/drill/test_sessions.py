"""Conversations of a simulated cluster: turns follow one another, and go where the last one was decoded."""

from __future__ import annotations

import itertools

import pytest

from baton.drill.draw import draw
from baton.drill.language import oracle
from baton.drill.run import play
from baton.drill.scenario import Scenario, Size
from baton.router.dispatch.affinity import SessionHomes
from tests.thorough import first_now

TALKS = Size(kinds=(), conversing=1.0, requests=4, flooded=0.0, overloaded=0.0, adapted=0.0, scaled=0.0, keyed=0.0)


def conversing(seed: int) -> Scenario:
    return draw(seed, TALKS)


def test_each_turn_has_the_answer_before_it_in_its_prompt_and_waits_for_its_end() -> None:
    seen = 0
    for seed in range(10):
        scenario = conversing(seed)
        by_number = {request.number: request for request in scenario.requests}
        for turn in (request for request in scenario.requests if request.follows >= 0):
            before = by_number[turn.follows]
            answer, _ = oracle.answer(before.prompt, before.sampling, 0, "", scenario.sight)
            assert turn.prompt[: len(before.prompt) + len(answer)] == (*before.prompt, *answer)
            assert (turn.session, turn.tenant) == (before.session, before.tenant)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("seed", first_now(range(3)))
def test_a_cluster_with_conversations_holds(seed: int) -> None:
    verdict = play(conversing(seed))
    assert verdict.held, verdict.violations


def test_a_turn_that_goes_home_to_a_worker_that_never_had_the_session_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    homes = itertools.count()
    monkeypatch.setattr(SessionHomes, "home", lambda self, request, workers: workers[next(homes) % len(workers)])
    found = (violation for seed in range(8) for violation in play(conversing(seed)).violations)
    assert any("its session's home, whose last turn" in violation for violation in found)
