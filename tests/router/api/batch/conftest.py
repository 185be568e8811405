"""A router with a store of batch jobs, as its tests share it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from baton.cluster.batch_store import BatchStore
from baton.cluster.config import RouterConfig
from baton.router.api.batch.lane import BatchLane
from baton.router.server import running_router
from baton.router.text.catalog import ModelCatalog
from tests.router.conftest import Clients
from tests.router.parts import generation_of, surfaces_of

ENDS = ("completed", "cancelled", "failed")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


class Bench:
    """A router with a store; lanes are started by the tests."""

    def __init__(self, clients: Clients, service, store: BatchStore) -> None:
        self.openai, self.http, self.service, self.store = clients.openai, clients.http, service, store
        self.queued = 0

    def lane(self, owner: str = "one") -> BatchLane:
        return BatchLane(self.service, self.store, owner, lambda model_id: not self.queued)

    async def submit(self, *bodies: dict, endpoint: str = "/v1/chat/completions"):
        lines = [
            {"custom_id": f"r{i}", "method": "POST", "url": endpoint, "body": body} for i, body in enumerate(bodies)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await self.openai.files.create(file=("in.jsonl", content), purpose="batch")
        return await self.openai.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
        )

    async def ended(self, batch_id: str):
        async with asyncio.timeout(120):
            while (batch := await self.openai.batches.retrieve(batch_id)).status not in ENDS:
                await asyncio.sleep(0.02)
        return batch

    async def lines(self, file_id: str) -> list[dict]:
        content = await self.openai.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


@pytest.fixture
async def bench(fake, model_dir, redis) -> AsyncIterator[Bench]:
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0, max_stored_bytes=100_000)
    store = BatchStore(redis, "t")
    service = generation_of(config, fake, ModelCatalog(fake.models, {"tiny": model_dir}))
    async with running_router(config, surfaces_of(config, service, store)) as address:
        clients = Clients(address)
        yield Bench(clients, service, store)
        await clients.close()
