"""Engines of one simulated machine lend one another cores, and answers' steps wait while prompts are read."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from baton.decode_worker.engine.pace import StepPace
from baton.drill.draw import draw
from baton.drill.loop import SeededLoop
from baton.drill.machines.cores import ALIVE_S, UNKNOWN_S, MachineCores
from baton.drill.run import play
from baton.drill.scenario import Request, Scenario, Size
from baton.protos.nouns import Sampling
from tests.thorough import first_now


def shared(seed: int) -> Scenario:
    """Answers of one machine's decode engines, among long prompts of its prefill engines."""
    quiet = {"flooded": 0.0, "overloaded": 0.0, "pressed": 0.0, "ahead": 0.0, "paged": 0.0, "scaled": 0.0}
    drawn = draw(seed, Size(kinds=(), lent=1.0, requests=2, **quiet))
    asks = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    rng = random.Random(seed)
    requests = tuple(
        Request(i, 0.05 * i, tuple(rng.randrange(900) for _ in range(10 if i % 3 else 400)), asks)
        for i in range(12)
    )
    plain = {"local_max": 0, "pages": 300, "token_s": 0.0005, "batches": (), "controller": False, "keys": ()}
    return msgspec.structs.replace(drawn, requests=requests, pins=(), adapters=(), **plain)


@pytest.mark.parametrize("seed", first_now(range(3)))
def test_a_cluster_whose_engines_share_cores_holds(seed: int) -> None:
    scenario = shared(seed)
    assert scenario.machines
    verdict = play(scenario)
    assert verdict.held, verdict.violations
    assert verdict.answered == 12


def test_a_step_that_is_held_back_though_nobody_reads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(self: StepPace) -> bool:
        self._held = self._left_s > 0
        return self._held

    monkeypatch.setattr(StepPace, "holds", holds)
    assert any("is held back for" in text for text in play(shared(0)).violations)


@pytest.mark.thorough
def test_a_step_that_is_never_held_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepPace, "holds", lambda self: False)
    assert any("beside prompts" in text for seed in range(3) for text in play(shared(seed)).violations)


def test_cores_of_those_that_rest_are_divided_and_an_engine_that_died_keeps_its_own_for_a_moment() -> None:
    loop = SeededLoop(random.Random(1))

    async def main() -> None:
        cores = MachineCores(4)
        reads, writes, other = (cores.join() for _ in range(3))
        reads.lent.begin_role("prefill")
        writes.lent.begin_role("decode")
        assert writes.begin() == 4
        assert reads.begin() == 2
        assert writes.begin() == 2
        assert other.begin() == 1  # what can't be divided is the writer's
        assert writes.begin() == 2
        assert writes.prompts_beside() == UNKNOWN_S
        reads.lent.tell_chunk(0.3)
        other.rest()
        assert writes.prompts_beside() == 0.3
        reads.leave()
        assert writes.prompts_beside() == 0.3
        await asyncio.sleep(ALIVE_S + 0.01)
        assert writes.prompts_beside() == 0.0
        assert writes.begin() == 4

    loop.run_until_complete(main())
    loop.close()
