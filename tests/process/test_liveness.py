"""The file that a probe looks at is touched while the health service says SERVING, and only then."""

import asyncio
from pathlib import Path

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio

from baton.process.liveness import alive_file, beat

OF = health_pb2.HealthCheckResponse


async def test_it_is_touched_while_the_worker_serves_and_no_longer(tmp_path: Path) -> None:
    health, file = aio.HealthServicer(), alive_file(str(tmp_path), "decode-0")
    await health.set("", OF.NOT_SERVING)
    asked = asyncio.Event()

    class Asked:
        async def Check(self, request, context):
            asked.set()
            return await health.Check(request, context)

    beating = asyncio.create_task(beat(Asked(), file, every_s=0.001))
    try:
        for _ in range(3):
            asked.clear()
            await asyncio.wait_for(asked.wait(), 30)
        assert not file.exists()
        await health.set("", OF.SERVING)
        async with asyncio.timeout(30):
            while not file.exists():
                await asyncio.sleep(0.001)
        await health.enter_graceful_shutdown()
        for _ in range(2):  # a touch may have been under way
            asked.clear()
            await asyncio.wait_for(asked.wait(), 30)
        file.unlink()
        for _ in range(3):
            asked.clear()
            await asyncio.wait_for(asked.wait(), 30)
        assert not file.exists()
    finally:
        beating.cancel()
