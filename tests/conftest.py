"""A real Redis server for whoever asks, flushed between tests."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from baton.cluster.membership import connect
from baton.deploy.redis_server import RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:  # unix sockets end at 107 bytes
        running = RedisServer(Path(folder)).start()
        yield running
        running.stop()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    if server.pid is None:  # a test before stopped it
        server.start()
    client = connect(server.url)
    await client.flushall()
    yield client
    await client.aclose()
