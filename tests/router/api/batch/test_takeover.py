"""A batch job under failures of its store: no answer is lost or stored twice, whoever holds the job.

The Redis is real; failures are injected into the client of one lane.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from redis.exceptions import ConnectionError as Broken

from baton.cluster.batch_nouns import BatchJob, JobClaimLost, ListPage, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.cluster.config import RouterConfig
from baton.cluster.membership import connect
from baton.protos.errors import QuotaExceeded, Unavailable, WorkerLost
from baton.router.access.caller import CALLER
from baton.router.api.batch import attempts
from baton.router.api.batch import lane as batch_lane
from baton.router.api.batch.lane import AT_ONCE, BatchLane
from baton.router.text.catalog import ModelCatalog
from tests.router.parts import generation_of
from tests.thorough import first_now, later

LINES = 1200
LEASE_S = 2.0  # a busy machine, which is late by a second, still renews it
JOB = BatchJob("batch_1", "acme", "/v1/completions", "file-1", "24h", LINES, 1)


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEASE_S", LEASE_S), ("RETRY_S", 0.02), ("LOOK_EVERY_S", 0.05), ("ROOM_EVERY_S", 0.01)):
        monkeypatch.setattr(batch_lane, name, seconds, raising=False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each line was answered by a worker."""
    counts: Counter[str] = Counter()

    async def answer(service, line, request_id):
        await asyncio.sleep(0.008)
        counts[line.custom_id] += 1
        return {"custom_id": line.custom_id}, True

    monkeypatch.setattr(attempts, "answer_line", answer)
    return counts


@pytest.fixture
async def bench(fake, model_dir, server, redis):
    bench = Bench(generation_of(RouterConfig(), fake, ModelCatalog(fake.models, {"tiny": model_dir})), server.url)
    yield bench
    await bench.close()


async def test_a_store_that_is_away_is_told_once_and_its_return_too(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="baton.router.api.batch.lane")
    answers = [Unavailable("the store of batch jobs can't be reached: Timeout"), []]
    asked = 0

    class Store:
        async def open_jobs(self) -> list[str]:
            nonlocal asked
            asked += 1
            if isinstance(answer := answers[0 if asked <= 3 else 1], Unavailable):
                raise answer
            return answer

    async with BatchLane(bench.service, Store(), "one", lambda model_id: True).running():
        while asked < 6:
            await asyncio.sleep(0.01)
    assert [record.message for record in caplog.records] == [
        "batch lane: the store of batch jobs can't be reached: Timeout; jobs wait until it answers",
        "batch lane: the store answers again",
    ]


class Bench:
    def __init__(self, service, url: str) -> None:
        self.service, self._url = service, url
        self.clients: list = []
        self.store = self.store_that()

    def store_that(self, fails: Callable[[str], bool] = lambda command: False) -> BatchStore:
        """A store whose client loses its connection where ``fails`` says so of a command's words."""
        client = connect(self._url)
        real = client.execute_command

        async def execute(*words, **options):
            if fails(" ".join(str(word)[:80] for word in words)):
                raise Broken("injected")
            return await real(*words, **options)

        client.execute_command = execute
        self.clients.append(client)
        return BatchStore(client, "t")

    def lane(self, owner: str, store: BatchStore | None = None) -> BatchLane:
        return BatchLane(self.service, store or self.store, owner, lambda model_id: True)

    async def submit(self, lines: int = LINES) -> BatchJob:
        asked = {"method": "POST", "url": JOB.endpoint, "body": {"prompt": "x"}}
        content = b"\n".join(msgspec.json.encode(asked | {"custom_id": f"r{n}"}) for n in range(lines))
        await self.store.add_file(StoredFile("file-1", "acme", "x", "batch", len(content), 1), content)
        job = msgspec.structs.replace(JOB, total=lines)
        await self.store.put(job, is_open=True)
        return job

    async def ended(self) -> tuple[BatchJob, list[str]]:
        """The job, and the lines of its output."""
        async with asyncio.timeout(200):
            while not (job := await self.store.job(JOB.id)).ended:
                await asyncio.sleep(0.02)
        content = await self.store.content(job.output_file)
        return job, [msgspec.json.decode(line)["custom_id"] for line in content.splitlines()]

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()


def is_renewal(command: str) -> bool:
    return command.startswith("EVALSHA") and ":owner" in command


ALL = [f"r{n}" for n in range(LINES)]


async def test_answers_that_the_store_loses_are_computed_again(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[bytes] = []
    output = "{t}:batch:batch_1:output"

    async def answer(service, line, request_id):
        if line.custom_id == "r20" and not lost:  # a replica that lacks the latest writes takes over
            lost.extend(await bench.clients[0].hkeys(output))
            await bench.clients[0].hdel(output, *lost)
        return {"custom_id": line.custom_id}, True

    monkeypatch.setattr(attempts, "answer_line", answer)
    await bench.submit(40)
    async with bench.lane("router").running():
        job, lines = await bench.ended()
    assert len(lost) > 20 - AT_ONCE
    assert (job.status, job.completed, lines) == ("completed", 40, ALL[:40])


async def test_a_job_whose_entry_the_store_lost_meanwhile_ends_with_the_counts_of_its_files(
    bench, redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(service, line, request_id):
        if line.custom_id == "r3":
            await redis.delete("{t}:batch:batch_1")
        return {"custom_id": line.custom_id}, line.custom_id != "r1"

    monkeypatch.setattr(attempts, "answer_line", answer)
    await bench.submit(5)
    await bench.lane("router").work(JOB.id)
    job = await bench.store.job(JOB.id)
    assert (job.status, job.total, job.completed, job.failed) == ("completed", 5, 4, 1)
    assert len((await bench.store.content(job.output_file)).splitlines()) == 4
    assert len((await bench.store.content(job.error_file)).splitlines()) == 1
    assert await bench.store.open_jobs() == []


async def test_a_line_whose_answer_cannot_be_written_fails_alone_and_once(bench, monkeypatch) -> None:
    asked: Counter[str] = Counter()

    async def answer(service, line, request_id):
        asked[line.custom_id] += 1
        return {"custom_id": line.custom_id, "body": "\ud83d" if line.custom_id == "r1" else "x"}, True

    monkeypatch.setattr(attempts, "answer_line", answer)
    await bench.submit(3)
    async with bench.lane("router").running():
        job, lines = await bench.ended()
    assert (job.status, job.completed, job.failed, lines) == ("completed", 2, 1, ["r0", "r2"])
    assert set(asked.values()) == {1}


async def test_a_tenant_whose_rate_is_used_up_holds_up_nobody_elses_job(bench, monkeypatch) -> None:
    used_up = asyncio.Event()

    async def answer(service, line, request_id):
        if CALLER.get().asked_id.startswith(JOB.id):
            used_up.set()
            raise QuotaExceeded("the key's rate is used up", retry_after_s=1000.0)
        return {"custom_id": line.custom_id}, True

    monkeypatch.setattr(attempts, "answer_line", answer)
    monkeypatch.setattr(attempts, "MOST_PAUSE_S", 1000.0)
    await bench.submit(40)
    async with bench.lane("router").running():
        await used_up.wait()
        other = msgspec.structs.replace(JOB, id="batch_2", tenant="other", total=40)
        await bench.store.put(other, is_open=True)
        async with asyncio.timeout(200):
            while not (job := await bench.store.job(other.id)).ended:
                await asyncio.sleep(0.02)
    assert (job.status, job.completed) == ("completed", 40)


async def test_a_tenants_jobs_go_one_after_the_other(bench, monkeypatch) -> None:
    order: list[str] = []

    async def answer(service, line, request_id):
        order.append(CALLER.get().asked_id.partition(":")[0])
        await asyncio.sleep(0.001)
        return {"custom_id": line.custom_id}, True

    monkeypatch.setattr(attempts, "answer_line", answer)
    await bench.submit(20)
    await bench.store.put(msgspec.structs.replace(JOB, id="batch_2", total=20), is_open=True)
    async with bench.lane("router").running(), asyncio.timeout(200):
        while await bench.store.open_jobs():
            await asyncio.sleep(0.02)
    assert len(order) == 40
    assert len({*order[:20]}) == len({*order[20:]}) == 1


async def test_a_cancelled_job_ends_also_while_others_wait_for_workers(bench, monkeypatch) -> None:
    await bench.submit(5)
    await bench.store.request_cancel(JOB.id, 1)
    async with BatchLane(bench.service, bench.store, "router", lambda model_id: False).running():
        job, lines = await bench.ended()
    assert (job.status, lines) == ("cancelled", [])


async def test_a_line_waits_longer_each_time_for_workers_that_are_gone(bench, monkeypatch) -> None:
    loop, tried, outage_s = asyncio.get_running_loop(), list[float](), 1.0

    async def answer(service, line, request_id):
        tried.append(loop.time())
        if loop.time() < tried[0] + outage_s:
            raise WorkerLost("the decode worker does not answer")
        return {"custom_id": line.custom_id}, True

    monkeypatch.setattr(attempts, "answer_line", answer)
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", outage_s / 2**4)
    await bench.submit(1)
    async with bench.lane("router").running():
        job, lines = await bench.ended()
    assert (job.status, job.completed, job.failed, lines) == ("completed", 1, 0, ["r0"])
    assert len(tried) <= attempts.TRIES


@pytest.mark.parametrize(("tries", "status"), [(1, "completed"), (6, "cancelled")])
async def test_a_line_waits_neither_after_its_last_attempt_nor_for_a_job_that_is_cancelled(
    bench, monkeypatch: pytest.MonkeyPatch, tries: int, status: str
) -> None:
    async def answer(service, line, request_id):
        if status == "cancelled":
            await bench.store.request_cancel(JOB.id, 1)
        raise WorkerLost("the decode worker does not answer")

    monkeypatch.setattr(attempts, "answer_line", answer)
    for name, value in (("TRIES", tries), ("FIRST_PAUSE_S", 1000.0), ("MOST_PAUSE_S", 1000.0)):
        monkeypatch.setattr(attempts, name, value)
    await bench.submit(1)
    async with asyncio.timeout(30):
        await bench.lane("router").work(JOB.id)
    job = await bench.store.job(JOB.id)
    assert (job.status, job.completed, job.failed) == (status, 0, 1)


async def test_one_failed_renewal_costs_nothing(bench, computed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lane, "LEASE_S", 3 * LEASE_S)
    begun, go_on, asked, answer = asyncio.Event(), asyncio.Event(), 0, attempts.answer_line

    def first(command: str) -> bool:
        nonlocal asked
        asked += begun.is_set() and is_renewal(command)
        return asked == 1 and is_renewal(command)

    async def answer_later(*line: object) -> object:
        begun.set()
        await go_on.wait()
        return await answer(*line)

    monkeypatch.setattr(attempts, "answer_line", answer_later)
    await bench.submit(100)
    async with bench.lane("one", bench.store_that(first)).running():
        await begun.wait()
        async with bench.lane("two").running():
            while asked < 2:
                await asyncio.sleep(0.01)
            go_on.set()
            job, lines = await bench.ended()
    assert (job.status, job.completed, lines) == ("completed", 100, ALL[:100])
    assert set(computed.values()) == {1}


@pytest.mark.parametrize("part", [":owner", later("")], ids=["renewals", "everything"])
async def test_a_lane_that_cannot_renew_stops_and_what_it_has_is_stored_once(bench, computed, part) -> None:
    cut = False
    await bench.submit()
    async with bench.lane("one", bench.store_that(lambda command: cut and part in command)).running():
        while len(computed) < 100:
            await asyncio.sleep(0.01)
        cut = True  # from now on it hears nothing: its lease runs out, and lane two takes the job
        async with bench.lane("two").running():
            while len(computed) < 300:
                await asyncio.sleep(0.01)
            cut = False  # it is back, with answers in its hands that lane two may have computed again
            job, lines = await bench.ended()
    assert (job.status, job.completed, lines) == ("completed", LINES, ALL)
    assert sum(computed.values()) <= LINES + AT_ONCE
    assert await bench.store.open_jobs() == []


@pytest.mark.parametrize("seed", first_now(range(3)))
async def test_a_store_that_fails_now_and_then_loses_no_answer_and_no_work(bench, computed, seed) -> None:
    rng = random.Random(seed)
    job = await bench.submit(200)
    store = bench.store_that(lambda command: rng.random() < 0.1)
    async with bench.lane("one", store).running():
        ended, lines = await bench.ended()
    assert (ended.status, ended.completed, lines) == ("completed", job.total, ALL[:200])
    assert sum(computed.values()) == 200
    files, _ = await bench.store.files(ListPage())
    assert [file.purpose for file in files].count("batch_output") == 1


async def test_a_claim_that_was_taken_over_writes_nothing_more(bench, redis) -> None:
    store, job = bench.store, await bench.submit(2)
    first = await store.claim(job.id, "one", 10)
    assert await store.claim(job.id, "one", 10) is None, "even its own router has to let go first"
    assert await store.claim(job.id, "two", 10) is None
    await redis.delete("{t}:batch:batch_1:owner")  # its lease ran out
    assert await store.renew(first, 10), "nobody took it meanwhile"
    await redis.delete("{t}:batch:batch_1:owner")
    second = await store.claim(job.id, "two", 10)
    assert second.number > first.number
    output = StoredFile("file-9", "acme", "x", "batch_output", 1, 1)
    for write in (
        lambda: store.answer(first, 0, b"{}", True),
        lambda: store.update(first, job),
        lambda: store.add_output(first, output, b"x"),
        lambda: store.close(first, job),
    ):
        with pytest.raises(JobClaimLost):
            await write()
    assert not await store.renew(first, 10)
    await store.release(first)
    assert await store.claim(job.id, "three", 10) is None, "only its holder lets go of it"
    await store.answer(second, 0, b"{}", True)
    ended = msgspec.structs.replace(job, status="completed", ended=1)
    await store.close(second, ended)
    await store.close(second, ended)  # an answer that was lost: done again it changes nothing
    assert not await store.renew(second, 10)
    assert await store.claim(job.id, "three", 10) is None, "it is closed"
    assert await store.file("file-9") is None
