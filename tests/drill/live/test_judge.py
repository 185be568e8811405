"""The live judge finds what a server does wrong, names it, and has nothing against one that does nothing wrong."""

from __future__ import annotations

import pytest

from baton.drill.live import judge
from baton.drill.live.http import Unreachable
from baton.drill.live.judge import LiveJudge, LiveLoad
from tests.drill.live.server import SmallServer
from tests.e2e.fleet import Fleet

PLAN = LiveLoad(questions=10, rounds=3, at_once=8, max_tokens=8, limit_s=30.0)


async def test_a_server_that_does_nothing_wrong_passes() -> None:
    async with SmallServer() as server:
        card = await LiveJudge(server.url, plan=PLAN).run()
    assert card.passed, card
    assert not card.differs
    assert card.requests > 3 * PLAN.questions
    assert card.refused == 0


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("foreign", "foreign"),
        ("changes", "differs"),
        ("repeats", "unlike"),
        ("loses", "unlike"),
        ("stops", "broken"),
        ("breaks", "broken"),
        ("shapeless", "broken"),
        ("health", "health"),
        ("held", "held"),
        ("endless", "endless"),
    ],
)
async def test_what_a_server_does_wrong_is_seen(fault: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "CALM_S", 0.05)
    monkeypatch.setattr(judge, "LOOK_S", 0.06 if fault == "health" else 0.005)  # an answer ends between looks
    plan = LiveLoad(10, 3, 8, 8, limit_s=1.0 if fault == "endless" else 30.0)
    async with SmallServer(fault) as server:
        card = await LiveJudge(server.url, plan=plan).run()
    assert getattr(card, seen), card


async def test_nobody_there_is_said() -> None:
    with pytest.raises(Unreachable, match="no connection"):
        await LiveJudge("http://127.0.0.1:9").run()


async def test_a_cluster_of_ours_passes_and_its_answers_are_the_same_under_load() -> None:
    with Fleet(prefill=1, decode=1, worker={"device": "paced:zero"}) as fleet:
        card = await LiveJudge(fleet.url, plan=PLAN).run()
    assert card.passed, card
    assert not card.differs, card.differs
    assert card.refused == 0
    assert card.random_alone == 0
