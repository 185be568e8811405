"""baton.cluster.scale and what watches it, over a real Redis."""

import asyncio

import pytest
from redis.asyncio import Redis

from baton.cluster.scale import BY_CONFIG, ScaleRequest, ask, begin, forget_scale, key, read
from baton.launch import scaling
from baton.launch.redis_server import RedisServer
from baton.protos.errors import ConfigError


async def test_what_was_asked_last_is_read_and_each_asking_has_its_serial(redis: Redis) -> None:
    assert await read(redis, "n") is None
    assert (await ask(redis, "n", ScaleRequest(3, 2))).serial == 1
    assert await ask(redis, "n", ScaleRequest(3, 2)) == ScaleRequest(3, 2, 2)
    assert await read(redis, "n") == ScaleRequest(3, 2, 2)
    assert await read(redis, "other") is None
    await redis.set(key("n"), b"of another version")
    assert await read(redis, "n") is None


@pytest.mark.parametrize("scale", [ScaleRequest(-1, 1), ScaleRequest(1, 0), ScaleRequest(1, 1025)])
async def test_numbers_that_cannot_be_are_refused(redis: Redis, scale: ScaleRequest) -> None:
    with pytest.raises(ConfigError, match="give 0 to 1024 and 1 to 1024"):
        await ask(redis, "n", scale)


async def test_a_watcher_hears_what_is_asked_from_now_on(server: RedisServer, redis: Redis, monkeypatch) -> None:
    monkeypatch.setattr(scaling, "LOOK_S", 0.02)
    heard: asyncio.Queue[ScaleRequest] = asyncio.Queue()
    await ask(redis, "n", ScaleRequest(9, 9))
    looked = asyncio.Event()

    async def look(*words) -> ScaleRequest | None:
        found = await read(*words)
        looked.set()
        return found

    monkeypatch.setattr(scaling, "read", look)
    watching = asyncio.create_task(scaling.watch_scale(server.url, "n", heard.put))
    await asyncio.wait_for(looked.wait(), 30)
    await ask(redis, "n", ScaleRequest(2, 3))
    async with asyncio.timeout(20):
        assert await heard.get() == ScaleRequest(2, 3, 2)
    assert heard.empty(), "what was asked before is not ours"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_what_was_asked_outlives_who_places_until_the_config_says_otherwise(
    server: RedisServer, redis: Redis
) -> None:
    assert await begin(redis, "p", ScaleRequest(1, 1)) == ScaleRequest(1, 1, 1, BY_CONFIG)
    await ask(redis, "p", ScaleRequest(3, 2))
    assert await begin(redis, "p", ScaleRequest(1, 1)) == ScaleRequest(3, 2, 2), "a placer that starts again"
    assert await begin(redis, "p", ScaleRequest(2, 2)) == ScaleRequest(2, 2, 3, BY_CONFIG), "with another config"
    await ask(redis, "p", ScaleRequest(5, 2))
    assert await begin(redis, "p", ScaleRequest(2, 2)) == ScaleRequest(5, 2, 4)
    forget_scale(server.url, "p")
    assert await begin(redis, "p", ScaleRequest(2, 2), ScaleRequest(5, 2)) == ScaleRequest(5, 2, 1, BY_CONFIG), (
        "what is there stays"
    )
