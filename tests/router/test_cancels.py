"""A client that goes in any turn of the event loop, an error at any line of opening: nothing is left."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from baton.cluster.prefix_index import PrefixIndex
from tests.faults import each_line
from tests.router.fake_workers import cluster, until

PROMPT = tuple(range(40))
TURNS = 80  # of the event loop, about twice as many as it takes to place a request


async def test_a_cancel_in_any_turn_is_heeded(redis: Redis) -> None:
    async with cluster(index=PrefixIndex(redis, "ns")) as c:
        c.d[0].hold_tokens.clear()  # what goes on without a client never ends
        for turns in range(TURNS):
            [stream] = c.open(PROMPT, request_id=f"r{turns}", max_tokens=50)
            for _ in range(turns):
                await asyncio.sleep(0)
            stream.cancel("client_gone")
        await until(lambda: len(c.dispatcher) == 0)
        await c.idle()


async def test_an_open_that_fails_at_any_line_leaves_nothing_behind() -> None:
    async with cluster() as c:
        c.d[0].hold_tokens.clear()
        failed = 0
        for fault in each_line(
            "router/dispatch/dispatcher.py",
            "router/dispatch/choice_run.py",
            "router/dispatch/progress.py",
            "router/dispatch/ticket.py",
            but=("_start",),
        ):
            streams = []
            with fault:
                streams = c.open(PROMPT, n=2)
            failed += not streams
            for stream in streams:
                stream.cancel("client_gone")
            await c.idle()
            assert c.dispatcher._admission.held_bytes == 0, fault.where
    assert failed > 30
