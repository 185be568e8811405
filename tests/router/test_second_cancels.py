"""One request's way through the router, cancelled wherever it waits: no place, lease or call of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from baton.router.api.disconnect import until_disconnect
from tests.cancels import ALL, TWICE, Play, enumerate_cancels
from tests.router.fake_services import answer_of
from tests.router.fake_workers import cluster, collect

PROMPT, SHORT = tuple(range(40)), (1, 2, 3)


@asynccontextmanager
async def request(prompt: tuple[int, ...], **fields: Any) -> AsyncIterator[Play]:
    async with cluster(decode=2, **fields) as c:
        readers: list[asyncio.Task[Any]] = []

        def begin() -> asyncio.Task[None]:
            [stream] = c.open(prompt)
            [task] = c.dispatcher._open
            readers.append(asyncio.create_task(collect(stream)))
            return task

        async def at_rest() -> None:
            await asyncio.gather(*readers, return_exceptions=True)
            await c.idle()
            [stream] = c.open(prompt, request_id="after")
            assert await collect(stream) == answer_of(prompt, 8)
            await c.idle()

        yield Play(lambda: asyncio.sleep(0), at_rest, begin=begin)


@asynccontextmanager
async def watched_call() -> AsyncIterator[Play]:
    """Plays what a surface awaits for a client that may leave."""
    cleaned: list[int] = []

    async def work() -> None:
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def at_rest() -> None:
        while len(asyncio.all_tasks()) > 2:
            await asyncio.sleep(0)

    yield Play(lambda: until_disconnect(receive, work()), at_rest)


WAYS = {"handed over": partial(request, PROMPT), "local": partial(request, SHORT)}


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_is_cancelled_twice_leaves_nothing(way: str) -> None:
    assert await enumerate_cancels(WAYS[way], [TWICE], every=12)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
async def test_a_request_may_be_cancelled_at_every_await(way: str) -> None:
    assert await enumerate_cancels(WAYS[way], ALL)


async def test_work_for_a_client_ends_whenever_it_is_cancelled() -> None:
    assert await enumerate_cancels(watched_call, ALL)
