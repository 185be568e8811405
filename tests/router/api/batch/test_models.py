"""Batch jobs of several models before the real dispatcher: a busy or lost one holds up its own lines alone."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.cluster.batch_nouns import BatchJob, StoredFile
from baton.cluster.batch_store import READ_AT_ONCE, BatchStore
from baton.cluster.config import RouterConfig
from baton.protos.errors import Overloaded
from baton.router.api.batch import attempts
from baton.router.api.batch.attempts import TRIES
from baton.router.api.batch.lane import AT_ONCE, BatchLane
from baton.router.api.batch.side_by_side import JobAsk
from baton.router.text.catalog import ModelCatalog
from tests.router.fake_services import FakeDecode
from tests.router.fake_workers import IMPATIENT, Cluster, cluster, collect, until
from tests.router.parts import generation_of

COMPLETIONS = "/v1/completions"


class Jobs:
    """A cluster of models "m" and "other", a decode worker each, and the store of its batch jobs."""

    def __init__(self, c: Cluster, store: BatchStore) -> None:
        self.c, self.store = c, store
        catalog = ModelCatalog(c.dispatcher.models)
        self.service = generation_of(RouterConfig(), c.dispatcher, catalog)
        self.lane = BatchLane(self.service, store, "router", c.dispatcher.spare)

    async def put(self, name: str, *models: str, tenant: str = "acme") -> None:
        """Puts a job of one line per model named; what it is for is known as by ``POST /v1/batches``."""
        lines = [
            {
                "custom_id": f"r{n}",
                "method": "POST",
                "url": COMPLETIONS,
                "body": {"model": model, "prompt": [n + 1] * 3, "max_tokens": 2},
            }
            for n, model in enumerate(models)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        await self.store.add_file(StoredFile(f"file-{name}", tenant, "x", "batch", len(content), 1), content)
        known = tuple(sorted({*models}))
        job = BatchJob(name, tenant, COMPLETIONS, f"file-{name}", "24h", len(lines), 1, models=known)
        await self.store.put(job, is_open=True)

    async def completed(self, name: str, count: int, status: str = "completed") -> BatchJob:
        """Waits until a job has so many good answers, and returns it."""
        async with asyncio.timeout(60):
            while (job := await self.store.job(name)).completed < count or job.status != status:
                await asyncio.sleep(0.01)
        return job


@asynccontextmanager
async def two_models(redis, **fields):
    def other(c: Cluster) -> None:
        c.d.append(FakeDecode("other", model_id="other"))

    async with cluster(0, 1, policy="cost", max_batch=1, prepare=other, **fields) as c:
        yield Jobs(c, BatchStore(redis, "t"))


async def busy(c: Cluster):
    """Makes model "m" one whose only seat is taken, and for which one more request waits."""
    c.d[0].hold_tokens.clear()
    streams = [c.open([5] * 3, 2, request_id=f"r{n}")[0] for n in range(2)]
    await until(lambda: len(c.d[0].leases) == 1 and c.dispatcher.queued() == 1)
    return [asyncio.create_task(collect(stream)) for stream in streams]


async def test_a_busy_model_holds_up_no_other_models_job(redis) -> None:
    async with two_models(redis) as jobs:
        waiting = await busy(jobs.c)
        await jobs.put("batch_1", "m", tenant="first")
        await jobs.put("batch_2", "other", "other")
        async with jobs.lane.running():
            await jobs.completed("batch_2", 2)
            assert (await jobs.store.job("batch_1")).completed == 0
            assert jobs.c.d[0].admits[1:] == [], "a line went before somebody who waits"
            jobs.c.d[0].hold_tokens.set()
            await jobs.completed("batch_1", 1)
        await asyncio.gather(*waiting)


async def test_a_busy_model_holds_up_no_other_models_lines_of_its_own_job(redis) -> None:
    async with two_models(redis) as jobs:
        waiting = await busy(jobs.c)
        await jobs.put("batch_1", *["m"] * (AT_ONCE + 1), *["other"] * 3)
        async with jobs.lane.running():
            await jobs.completed("batch_1", 3, "in_progress")
            jobs.c.d[0].hold_tokens.set()
            await jobs.completed("batch_1", AT_ONCE + 4)
        await asyncio.gather(*waiting)


async def test_jobs_of_a_model_that_is_gone_hold_up_nobody_and_wait_for_it(redis) -> None:
    async with two_models(redis) as jobs:
        await jobs.c.d[0].die()
        await until(lambda: not jobs.c.view.ready("m"))
        for n in range(AT_ONCE + 1):
            await jobs.put(f"batch_{n}", "m", tenant=f"tenant {n}")
        await jobs.put("batch_other", "other", tenant="tenant 0")
        async with jobs.lane.running():
            await jobs.completed("batch_other", 1)
        assert {(await jobs.store.job(f"batch_{n}")).failed for n in range(AT_ONCE + 1)} == {0}


async def test_a_model_that_this_router_has_not_seen_yet_is_waited_for(redis) -> None:
    async with two_models(redis) as jobs:
        await jobs.put("batch_1", "coming", "gone")
        job = await jobs.store.job("batch_1")
        await jobs.store.put(msgspec.structs.replace(job, models=("", "coming")), is_open=True)
        async with jobs.lane.running():
            async with asyncio.timeout(60):
                while (await jobs.store.job("batch_1")).failed < 1:  # nobody ever knew of the other one
                    await asyncio.sleep(0.01)
            jobs.c.d.append(FakeDecode("late", model_id="coming"))
            await jobs.c.d[-1].start()
            jobs.c.roster.join(jobs.c.d[-1])
            await jobs.completed("batch_1", 1)


async def test_a_line_under_way_waits_for_its_model_to_come_back(redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)
    async with two_models(redis, settings=IMPATIENT) as jobs:
        jobs.c.d[0].hold_tokens.clear()
        await jobs.put("batch_1", "m", "m")
        async with jobs.lane.running():
            await until(lambda: jobs.c.d[0].leases)
            await jobs.c.d[0].die()
            jobs.c.roster.leave("d0")
            await asyncio.sleep(3.0)  # longer than its tries would last
            assert (await jobs.store.job("batch_1")).failed == 0
            jobs.c.d.append(FakeDecode("d1", model_id="m"))
            await jobs.c.d[-1].start()
            jobs.c.roster.join(jobs.c.d[-1])
            await jobs.completed("batch_1", 2)


async def test_a_line_that_the_queue_refuses_is_asked_again_until_there_is_room(
    redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(attempts, "MOST_PAUSE_S", 0.01)
    async with two_models(redis) as jobs:
        refusals, opened = (
            [Overloaded("the queue is full", retry_after_s=1.0)] * (3 * TRIES),
            jobs.service.serving.open,
        )

        def full(request):
            if refusals:
                raise refusals.pop()
            return opened(request)

        monkeypatch.setattr(jobs.service.serving, "open", full)
        await jobs.put("batch_1", "m")
        await jobs.lane.work("batch_1")
        job = await jobs.store.job("batch_1")
        assert (job.status, job.completed, job.failed) == ("completed", 1, 0)


async def test_many_answers_are_read_some_at_a_time(redis) -> None:
    store, lines = BatchStore(redis, "t"), 4 * READ_AT_ONCE
    job = BatchJob("batch_1", "acme", COMPLETIONS, "file-1", "24h", lines, 1)
    await store.put(job, is_open=True)
    claim = await store.claim("batch_1", "one", 60.0)
    for line in range(lines):
        await store.answer(claim, line, b"x" * 200, True)
    asked, execute = list[str](), store._redis.execute_command

    async def noted(*words, **options):
        asked.append(words[0])
        return await execute(*words, **options)

    store._redis.execute_command = noted
    assert await store.answers("batch_1", True) == dict.fromkeys(range(lines), b"x" * 200)
    assert len(asked) >= 3
    assert {*asked} == {"HSCAN"}


async def test_a_jobs_cancel_is_looked_for_once_by_all_that_work_on_it(redis) -> None:
    async with two_models(redis) as jobs:
        looks, seen = 0, jobs.store.cancel_requested

        async def looked(job_id: str) -> int:
            nonlocal looks
            looks += 1
            return await seen(job_id)

        jobs.store.cancel_requested = looked
        await jobs.put("batch_1", *["other"] * 40)
        async with jobs.lane.running():
            done = await jobs.completed("batch_1", 40)
    assert done.status == "completed"
    assert looks < 40, "each line looked by itself"


@pytest.mark.parametrize(
    ("own", "others", "behind"),
    [
        (JobAsk("a", 1, frozenset({"m"})), JobAsk("a", 1, frozenset({"m", "n"})), True),
        (JobAsk("a", 1, frozenset({"m"})), JobAsk("a", 1, frozenset({"n"})), False),
        (JobAsk("a", 1, frozenset({"m"})), JobAsk("b", 1, frozenset({"m"})), False),
        (JobAsk("a", 1, frozenset()), JobAsk("a", 1, frozenset({"n"})), True),
    ],
)
def test_a_tenants_jobs_go_one_after_the_other_unless_they_are_for_different_models(own, others, behind) -> None:
    assert own.goes_behind(others) == behind
