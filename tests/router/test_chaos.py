"""Seeded random faults, deaths, restarts and cancels: no answer is ever wrong, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random

import msgspec
import pytest

from baton.protos.errors import BatonError, Cancelled, CorruptFrame, PoolExhausted, WorkerLost
from tests.router.fake_services import answer_of
from tests.router.fake_workers import cluster, collect, until
from tests.thorough import first_now

FAULTS = (CorruptFrame("bad"), PoolExhausted("full"), WorkerLost("gone"))
CLIENTS, REQUESTS = 12, 10  # requests of each, one after the other
PER_FAULT = 3  # requests that end between two rounds of faults, so that a slow machine meets no more of them


async def break_things(c, rng: random.Random, fates: list[str]) -> None:
    """Faults, now and then a death, and a new incarnation soon after."""
    for ended in range(PER_FAULT, CLIENTS * REQUESTS, PER_FAULT):
        await until(lambda ended=ended: len(fates) >= ended, 120)
        rng.choice(c.p).failures.append(rng.choice(FAULTS))
        rng.choice(c.d).refusals.append(PoolExhausted("full"))
        if rng.random() < 0.3:
            worker = rng.choice([*c.p, *c.d])
            await worker.die()
            c.roster.leave(worker.info.worker_id)
            await asyncio.sleep(0.05)
            born = f"{worker.info.worker_id}-{rng.random()}"
            worker.info = msgspec.structs.replace(worker.info, incarnation=born)
            await worker.start()
            c.roster.join(worker)
            for p in c.p:
                p.decodes = {d.info.address: d for d in c.d}


async def client(c, rng: random.Random, fates: list[str]) -> None:
    """Makes requests, one after the other, and adds their fates to ``fates``."""
    for _ in range(REQUESTS):
        await asyncio.sleep(rng.random() * 0.05)
        fates.append(await one(c, rng))


async def one(c, rng: random.Random) -> str:
    """Makes a request; returns its fate: "right", "cancelled" or an error's label."""
    prompt = tuple(rng.randrange(1000) for _ in range(rng.choice((3, 20, 70, 300))))
    [stream] = c.open(prompt, max_tokens=rng.choice((1, 5, 30)))
    if rng.random() < 0.25:
        asyncio.get_running_loop().call_later(rng.random() * 0.3, stream.cancel, "client_gone")
    try:
        ids = await asyncio.wait_for(collect(stream), 60)
    except Cancelled:
        return "cancelled"
    except BatonError as error:
        return error.label
    assert ids == answer_of(prompt, len(ids))
    assert stream.summary.finish_reason == "length"
    return "right"


@pytest.mark.parametrize("seed", first_now(range(3)))
async def test_no_answer_is_wrong_and_nothing_is_left_under_faults(seed):
    rng = random.Random(seed)
    async with cluster(2, 2) as c:
        for d in c.d:
            d.pace_s = 0.002
        fates: list[str] = []
        await asyncio.gather(break_things(c, rng, fates), *(client(c, rng, fates) for _ in range(CLIENTS)))
        await c.idle()
    gc.collect()  # stopped servers want to be freed while their loop lives
    assert fates.count("right") > 60, fates
    assert not {"internal", "deadline_exceeded"} & set(fates), fates
