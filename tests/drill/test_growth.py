"""No container of a whole cluster grows with the requests that it has served: routers, services and engines."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from baton.drill import world
from baton.drill.draw import draw
from baton.drill.loop import SeededLoop
from baton.drill.parts.aims import Aims
from baton.drill.parts.clients import Clients
from baton.drill.run import end_loop
from baton.drill.scenario import Size
from baton.drill.story import Story
from baton.drill.world import World
from baton.kv.pages.worth import REMEMBERED
from baton.router.dispatch.affinity import KEPT_SESSIONS
from baton.router.observe.decisions import KEPT_REQUESTS
from tests import growth
from tests.growth import grown

SEED, REQUESTS, PAGES = 8, 10, 300
# What is kept of past requests on purpose, with the most that may be there.
BOUNDS = {
    "decisions._ring": KEPT_REQUESTS,
    "decisions._aliases": KEPT_REQUESTS,
    "_homes": KEPT_SESSIONS,
    "supply.cached._remembered": REMEMBERED,
    **dict.fromkeys(("supply.free", "supply.cached._runs", "supply.cached._plan"), PAGES),
    **dict.fromkeys(("supply.cached._runs[].pages", "supply.cached._run[].pages"), 2 * PAGES),
}
PACKAGES = ("cluster", "cost", "decode_worker", "engine", "kv", "prefill_worker", "protos", "router", "worker")
WALKED = (*(f"baton.{package}." for package in PACKAGES), "prometheus_client.")


class Rounds(World):
    """Plays the scenario's requests again and again, under new numbers, and looks at what grew."""

    grew: dict[str, list[int]]

    def _roots(self) -> dict[str, object]:
        lives = {slot: worker.life for slot, worker in self.workers.items() if worker.life is not None}
        found: dict[str, object] = {f"{slot} io": life.runtime for slot, life in lives.items()}
        found |= {f"{slot} engine": life.engine.loop for slot, life in lives.items()}
        return found | {router.name: router.parts.core for router in self.routers if router.parts is not None}

    async def _play(self, clients: Clients, aims: Aims, began: float) -> None:
        async def serve(number: int) -> None:
            own = [msgspec.structs.replace(r, number=r.number + 1000 * number) for r in self.scenario.requests]
            await asyncio.gather(*(clients.ask(request, self.loop.time()) for request in own))
            await asyncio.sleep(15.0)  # until nothing of them is at work, and what has a time is over

        self.grew = await grown(self._roots, serve, BOUNDS)


@pytest.mark.thorough  # tests/router/test_growth.py, tests/worker/test_growth.py
def test_no_container_of_a_cluster_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "WALKED", WALKED)
    monkeypatch.setattr(world, "PHASES_S", 3600.0)
    drawn = draw(SEED, Size(workers=1, requests=40, kinds=()))
    scenario = msgspec.structs.replace(drawn, requests=drawn.requests[:REQUESTS], batches=(), pages=PAGES)
    loop = SeededLoop(random.Random(1))
    rounds = Rounds(scenario, Story(False), loop)
    try:
        loop.run_until_complete(rounds.run())
    finally:
        end_loop(loop)
        rounds.close()
    assert not rounds.judge.violations
    assert not rounds.grew
