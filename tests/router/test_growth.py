"""A router that has served much holds no more than one that has served a little."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.cluster.config import RouterConfig
from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.errors import CorruptFrame, PoolExhausted
from baton.router.dispatch.affinity import KEPT_SESSIONS
from baton.router.dispatch.throttle import Throttle
from baton.router.observe.decisions import KEPT_REQUESTS
from baton.router.server import running_router
from baton.router.text.catalog import ModelCatalog
from tests.growth import grown, sizes
from tests.router.fake_services import FakeWorker
from tests.router.fake_workers import Cluster, cluster
from tests.router.parts import generation_of, surfaces_of
from tests.thorough import later

AT_ONCE = 50
# What is kept of past requests on purpose, with the most that may be there.
BOUNDS = {
    "_decisions._ring": KEPT_REQUESTS,
    "_decisions._aliases": KEPT_REQUESTS,
    "_homes": KEPT_SESSIONS,
}


async def one(c: Cluster, http: httpx.AsyncClient, rng: random.Random) -> None:
    """A request of any kind: whole or streamed, of one or several choices, left, refused or wrong."""
    body = {
        "model": rng.choice(["m"] * 9 + [f"unknown-{rng.random()}"]),
        "prompt": [rng.randrange(1000) for _ in range(rng.choice((3, 20, 70)))],
        "max_tokens": rng.choice((-1, 1, 5, 30)),
        "n": rng.choice((1, 1, 1, 3)),
        "stream": rng.random() < 0.5,
        "cache_salt": str(rng.random()),
        "prompt_cache_key": str(rng.random()),
        "user": str(rng.random()),
    }
    if rng.random() < 0.2:
        rng.choice(c.p).failures.append(CorruptFrame("bad"))
        rng.choice(c.d).refusals.append(PoolExhausted("full"))
    headers = {"x-request-id": f"id-{rng.random()}", "x-baton-session": str(rng.random())}
    patience = rng.uniform(0.0, 0.05) if rng.random() < 0.3 else 20.0
    try:
        async with asyncio.timeout(patience):
            await http.post(
                rng.choice(["/v1/completions", "/v1/completions", "/v1/nothing"]), json=body, headers=headers
            )
    except TimeoutError:
        pass


async def again(c: Cluster, worker: FakeWorker, number: int) -> None:
    """Another incarnation of ``worker``, at another address."""
    await worker.die()
    c.roster.leave(worker.info.worker_id)
    worker.info = msgspec.structs.replace(worker.info, incarnation=f"{number}")
    await worker.start()
    c.roster.join(worker)
    for p in c.p:
        p.decodes = {d.info.address: d for d in c.d}
    await c.all_up()


async def soaked(requests: int, rounds: int, restarts: bool = True) -> dict[str, list[int]]:
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0)
    async with cluster(2, 2) as c:
        catalog = ModelCatalog(c.dispatcher.models, {"m": None})
        metrics = RouterMetrics(CollectorRegistry())
        service = generation_of(config, c.dispatcher, catalog, decisions=c.core.decisions, metrics=metrics)
        async with running_router(config, surfaces_of(config, service)) as address:

            async def serve(number: int) -> None:
                rng = random.Random(number)
                async with httpx.AsyncClient(base_url=address.url, timeout=30, verify=False) as http:
                    for _ in range(requests // AT_ONCE):
                        await asyncio.gather(*(one(c, http, rng) for _ in range(AT_ONCE)))
                    await c.idle()
                    await http.get("/metrics")
                if restarts:
                    await again(c, rng.choice([*c.p, *c.d]), number)
                await c.core.decisions.flush()

            return await grown(lambda: {"dispatcher": c.dispatcher, "service": service}, serve, BOUNDS, rounds)


@pytest.mark.parametrize("restarts", [later(True), False])  # a session with a worker may last for months
async def test_nothing_in_a_router_grows_with_the_requests_served(restarts: bool) -> None:
    assert await soaked(requests=50, rounds=4, restarts=restarts) == {}


@pytest.mark.soak
async def test_nothing_in_a_router_grows_in_a_long_run() -> None:
    assert await soaked(requests=1000, rounds=6) == {}


async def test_the_walk_names_what_grew_wherever_it_hangs() -> None:
    throttle, kept = Throttle(lambda: 0.0), list[int]()
    throttle.watcher = partial(lambda: kept)  # type: ignore[attr-defined]

    async def serve(number: int) -> None:
        kept.append(number)

    found = await grown(lambda: {"throttle": throttle}, serve, {})
    assert found == {"throttle.watcher.func.cell": [*range(1, len(kept) + 1)]}
    assert sizes({"a": [{1: [2, 3]}, {4: [5]}]})["a[][]"] == 3
