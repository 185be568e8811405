"""Requests that find no pages or no place in the queue."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from baton.protos.errors import (
    ContextTooLong,
    Overloaded,
    PoolExhausted,
)
from tests.router.dispatch.prompts import PROMPT, SHORT
from tests.router.fake_services import answer_of
from tests.router.fake_workers import PATIENT, cluster, collect, until

# ---- no room -----------------------------------------------------------------------------------------


async def test_a_refusal_for_want_of_pages_tries_elsewhere_at_once():
    async with cluster(1, 2) as c:
        c.d[0].refusals = [PoolExhausted("full")] * 50
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert (stream.summary.decode_worker, stream.summary.attempts) == ("d1", 1)
        await c.idle()


async def test_requests_that_find_no_pages_wait_without_losing_their_place():
    async with cluster() as c:
        c.d[0].refusals = [PoolExhausted("full")] * 3
        done: list[int] = []
        streams = [c.open((i, i, i))[0] for i in range(3)]

        async def run(i: int) -> None:
            assert await collect(streams[i]) == answer_of((i, i, i), 8)
            done.append(i)

        await asyncio.gather(*(run(i) for i in range(3)))
        assert [a.token_ids[0] for a in c.d[0].admits][-3:] == [0, 1, 2]
        await c.idle()


async def test_a_tight_worker_is_asked_by_one_at_a_time_in_the_queues_order():
    async with cluster(settings=msgspec.structs.replace(PATIENT, full_wait_s=300.0)) as c:
        c.d[0].pages_free = 2
        c.d[0].pace_s = 0.005
        streams = [c.open((i, i, i))[0] for i in range(12)]
        await asyncio.gather(*(collect(s) for s in streams))
        granted = [a.token_ids[0] for a in c.d[0].admits if a.request_id in c.d[0].granted]
        assert granted == sorted(granted)
        assert len(c.d[0].admits) < 12 + 10 + 12
        await c.idle()


async def test_the_end_of_a_request_wakes_those_that_wait_for_its_pages():
    async with cluster(settings=msgspec.structs.replace(PATIENT, full_wait_s=300.0)) as c:
        c.d[0].stall_after(1)
        [first] = c.open(SHORT)
        await anext(first)
        c.d[0].refusals = [PoolExhausted("full")]
        [second] = c.open(SHORT)
        await until(lambda: not c.d[0].refusals)
        c.d[0].hold_tokens.set()
        await asyncio.wait_for(asyncio.gather(collect(second), drain(first)), 60)
        await c.idle()


async def drain(stream) -> None:
    async for _ in stream:
        pass


async def test_a_prompt_that_no_pool_could_hold_is_refused_by_name():
    async with cluster(pages=2) as c:
        [stream] = c.open(PROMPT)
        with pytest.raises(ContextTooLong, match=r"40 tokens: .* holds 32 tokens; shorten it by .* 8") as told:
            await collect(stream)
        assert told.value.param == "prompt"
        await c.idle()


async def test_a_full_queue_is_overloaded_with_a_time_to_come_back():
    async with cluster(max_queue=3, max_batch=1) as c:
        c.d[0].hold_tokens.clear()
        streams = [c.open(SHORT)[0]]
        await until(lambda: c.d[0].admits)
        streams += [c.open(SHORT)[0] for _ in range(3)]
        with pytest.raises(Overloaded) as caught:
            c.open(SHORT)
        assert caught.value.retry_after_s >= 1
        c.d[0].hold_tokens.set()
        assert await asyncio.gather(*(collect(s) for s in streams)) == [answer_of(SHORT, 8)] * 4
        assert c.d[0].most == 1
        await c.idle()


async def test_long_prompts_wait_in_the_router_until_a_prefill_is_imminent():
    prompt = tuple(range(500)) * 4  # 2,000 tokens; a worker is handed 4,096 ahead
    async with cluster() as c:
        c.p[0].hold.clear()
        streams = [c.open(prompt)[0] for _ in range(6)]
        await until(lambda: (c.p[0].running, len(c.d[0].leases)) == (2, 2))
        await asyncio.sleep(0.2)
        assert (c.p[0].running, len(c.d[0].leases)) == (2, 2), "no more than that"
        c.p[0].hold.set()
        await asyncio.gather(*(collect(s) for s in streams))
        await c.idle()
