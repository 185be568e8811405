"""The batch lane, stopped wherever it waits: its job is another router's at once, and no answer is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from redis.asyncio import Redis

from baton.cluster.batch_store import BatchJob, BatchStore, StoredFile
from baton.cluster.config import RouterConfig
from baton.router.api.batch import attempts
from baton.router.api.batch import lane as batch_lane
from baton.router.api.batch.lane import BatchLane
from baton.router.text.catalog import ModelCatalog
from tests.cancels import ALL, ONCE, TICKS_LATER, Play, enumerate_cancels
from tests.router.parts import generation_of

LINES = 5
NAMES = [f"r{n}" for n in range(LINES)]


class Lanes:
    """Two routers' lanes beside one Redis, jobs of a few lines; a line's answer takes three turns of the loop."""

    def __init__(self, service, redis: Redis) -> None:
        self.service, self.store = service, BatchStore(redis, "t")
        self.answered: Counter[str] = Counter()
        self._numbers = itertools.count()

    async def answer(self, service, line, request_id) -> tuple[dict[str, object], bool]:
        for _ in range(3):
            await asyncio.sleep(0)
        self.answered[line.custom_id] += 1
        return {"custom_id": line.custom_id}, True

    async def submit(self) -> BatchJob:
        number = next(self._numbers)
        self.answered.clear()
        asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        content = b"\n".join(msgspec.json.encode(asked | {"custom_id": name}) for name in NAMES)
        file = StoredFile(f"file-{number}", "acme", "x", "batch", len(content), 1)
        await self.store.add_file(file, content)
        job = BatchJob(f"batch_{number}", "acme", "/v1/completions", file.id, "24h", LINES, 1)
        await self.store.put(job, is_open=True)
        return job

    def lane(self, owner: str) -> BatchLane:
        return BatchLane(self.service, self.store, owner, lambda model_id: True)

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[Play]:
        job = await self.submit()

        async def serve() -> None:
            async with self.lane("one").running():
                while not (await self.store.job(job.id)).ended:
                    await asyncio.sleep(0.001)

        async def taken_over() -> None:
            if not (await self.store.job(job.id)).ended:
                await self.lane("two").work(job.id)  # answers nothing if lane one's lease is still there
            ended = await self.store.job(job.id)
            assert ended.status == "completed", f"{ended.status}: the lease was not given back"
            lines = (await self.store.content(ended.output_file)).splitlines()
            assert [msgspec.json.decode(line)["custom_id"] for line in lines] == NAMES
            assert sum(self.answered.values()) <= 2 * LINES, "a lane went on after it had been stopped"

        yield Play(serve, taken_over)


@pytest.fixture
def lanes(fake, model_dir, redis, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    lanes = Lanes(generation_of(RouterConfig(), fake, ModelCatalog(fake.models, {"tiny": model_dir})), redis)
    monkeypatch.setattr(attempts, "answer_line", lanes.answer)
    for name in ("LOOK_EVERY_S", "ROOM_EVERY_S"):
        monkeypatch.setattr(batch_lane, name, 0.002)
    return lanes


async def test_a_lane_stopped_at_some_waits_leaves_its_job_to_the_next(lanes: Lanes) -> None:
    assert await enumerate_cancels(lanes.playing, (ONCE, TICKS_LATER), every=7) > 10  # as often as it looks


@pytest.mark.thorough
async def test_a_lane_stopped_at_any_wait_leaves_its_job_to_the_next(lanes: Lanes) -> None:
    assert await enumerate_cancels(lanes.playing, ALL) > 300
