"""A real server for the tests of this folder, flushed between them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from baton.cluster.membership import connect
from baton.deploy.redis_server import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="bt-") as folder:  # pytest's own path is too long for a socket
        running = RedisServer(Path(folder)).start()
        yield running
        running.stop()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    if server.pid is None:
        server.start()
    client = connect(server.url)
    await client.flushall()
    yield client
    await client.aclose()
