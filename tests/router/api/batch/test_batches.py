"""Files and batches with the unmodified client against a real Redis: answered, cancelled, resumed, refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import msgspec
import openai
import pytest

from baton.cluster.adapters import AdapterEntry
from baton.cluster.batch_nouns import BatchJob, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.cluster.config import RouterConfig
from baton.protos.errors import Overloaded, QuotaExceeded
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing, add_key, noted, revoke_key
from baton.router.adapters.registry import AdapterRegistry
from baton.router.api.batch import held_job
from baton.router.api.batch import lane as batch_lane
from baton.router.api.batch.lane import BatchLane
from baton.router.api.batch.lines import answer_line
from baton.router.server import running_router
from baton.router.text.catalog import ModelCatalog
from tests.router.api.batch.conftest import CHAT, Bench
from tests.router.conftest import SAID, Clients
from tests.router.parts import generation_of, surfaces_of

SQL = AdapterEntry("sql", "tiny", "sql", "1" * 16)


@pytest.mark.parametrize("metadata", [{"a" * 65: "b"}, {"a": "b" * 513}, {str(n): "" for n in range(17)}])
async def test_metadata_is_as_small_as_openai_has_it(bench, metadata: dict[str, str]) -> None:
    file = await bench.openai.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="metadata"):
        await bench.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata=metadata
        )


class Full(AccessGate):
    """Says that the rate is used up, some times over."""

    times = 8

    async def charge(self, *_: object) -> None:
        self.times -= 1
        if self.times > 0:
            raise QuotaExceeded("used up", retry_after_s=0.01)


async def test_nobody_waits_for_a_line_so_it_has_no_slo_and_is_no_traffic_to_plan_for(
    fake, model_dir, redis, tmp_path
) -> None:
    file = tmp_path / "served.jsonl"
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0, trace_file=str(file))
    store = BatchStore(redis, "t")
    service = generation_of(config, fake, ModelCatalog(fake.models, {"tiny": model_dir}))
    async with running_router(config, surfaces_of(config, service, store)) as address:
        clients = Clients(address)
        bench = Bench(clients, service, store)
        batch = await bench.submit(CHAT, CHAT)
        async with bench.lane().running():
            assert (await bench.ended(batch.id)).request_counts.completed == 2
        asked = await clients.openai.chat.completions.create(**CHAT)
        await clients.close()
    contexts = [request.context.with_slos(1.0, 0.1) for request in fake.requests]
    assert [(c.can_wait, c.has_slo) for c in contexts] == [(True, False), (True, False), (False, True)]
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["output_length"] == asked.usage.completion_tokens


async def test_a_batch_is_answered_line_by_line_good_and_bad_apart(bench, fake) -> None:
    batch = await bench.submit(CHAT, CHAT | {"temperature": 9}, CHAT | {"max_tokens": 2})
    assert (batch.status, batch.request_counts.total) == ("validating", 3)
    async with bench.lane().running():
        done = await bench.ended(batch.id)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 1)
    assert done.metadata == {"a": "b"}
    good, bad = await bench.lines(done.output_file_id), await bench.lines(done.error_file_id)
    assert [line["custom_id"] for line in good] == ["r0", "r2"]
    assert good[0]["response"]["body"]["choices"][0]["message"]["content"] == SAID
    assert (bad[0]["custom_id"], bad[0]["response"]["status_code"]) == ("r1", 400)
    assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
    assert {request.context.priority for request in fake.requests} == {1000}
    assert [b.id async for b in bench.openai.batches.list()] == [batch.id]
    assert {f.purpose async for f in bench.openai.files.list()} == {"batch", "batch_output"}


async def test_an_output_file_is_joined_a_part_at_a_time_and_its_answers_are_held_once(monkeypatch) -> None:
    monkeypatch.setattr(batch_lane, "JOIN_BYTES", 100)
    answers, turns = {n: b"%d" % n * 10 for n in range(50)}, 0
    whole = b"".join(answer + b"\n" for answer in answers.values())

    async def others() -> None:
        nonlocal turns
        while answers:
            turns += 1
            await asyncio.sleep(0)

    joining = asyncio.create_task(batch_lane.joined(answers))
    await others()
    assert bytes(await joining) == whole
    assert turns >= len(whole) // 200


async def test_time_that_a_line_waits_in_the_queue_is_not_the_lines(bench, fake) -> None:
    batch = await bench.submit(CHAT)
    async with bench.lane().running():
        await bench.ended(batch.id)
    assert [request.context.can_wait for request in fake.requests] == [True]


async def test_lines_of_a_batch_are_on_the_adapters_that_they_name(fake, model_dir, redis) -> None:
    config, store = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0), BatchStore(redis, "t")
    catalog = ModelCatalog(fake.models, {"tiny": model_dir}, time.time, AdapterRegistry((SQL,)))
    service = generation_of(config, fake, catalog)
    async with running_router(config, surfaces_of(config, service, store)) as address:
        bench = Bench(clients := Clients(address), service, store)
        batch = await bench.submit(*(CHAT | {"model": name} for name in ("sql", "tiny", "gone")))
        async with bench.lane().running():
            done = await bench.ended(batch.id)
        good, bad = await bench.lines(done.output_file_id), await bench.lines(done.error_file_id)
        await clients.close()
    assert [(line["custom_id"], line["response"]["body"]["model"]) for line in good] == [
        ("r0", "sql"),
        ("r1", "tiny"),
    ]
    assert sorted(request.context.adapter_id for request in fake.requests) == ["", SQL.adapter_id]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in bad] == [("r2", 404)]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": 0}),
        ("/v1/responses", {"input": "x", "temperature": 0}),
    ],
)
async def test_each_endpoint_has_its_batches(bench, endpoint, body) -> None:
    batch = await bench.submit(body, endpoint=endpoint)
    async with bench.lane().running():
        done = await bench.ended(batch.id)
    assert done.request_counts.completed == 1


async def test_texts_of_a_batch_have_the_vectors_that_they_have_alone(bench) -> None:
    asked = [{"input": ["x", "y z"], "dimensions": 2}, {"input": "x", "encoding_format": "base64"}, {"input": []}]
    batch = await bench.submit(*asked, endpoint="/v1/embeddings")
    async with bench.lane().running():
        done = await bench.ended(batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    good, [bad] = await bench.lines(done.output_file_id), await bench.lines(done.error_file_id)
    alone = [await bench.http.post("/v1/embeddings", json=body) for body in asked]
    assert [line["response"]["body"] for line in good] == [each.json() for each in alone[:2]]
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("r2", alone[2].status_code) == ("r2", 400)


async def test_a_job_goes_on_where_another_router_left_it(bench, fake) -> None:
    batch, run, go_on = await bench.submit(*[CHAT | {"max_tokens": 5}] * 60), fake._run, asyncio.Event()

    async def hold_the_sixth(request, stream) -> None:
        if not any(request is one for one in fake.requests[:5]):
            await go_on.wait()
        await run(request, stream)

    fake._run = hold_the_sixth
    async with bench.lane("one").running():
        while (await bench.store.job(batch.id)).completed < 5:
            await asyncio.sleep(0.01)
    assert (await bench.store.job(batch.id)).completed == 5
    go_on.set()
    async with bench.lane("two").running():
        done = await bench.ended(batch.id)
    assert done.request_counts.completed == 60
    assert len(await bench.lines(done.output_file_id)) == 60
    assert len(fake.requests) <= 60 + 8  # only what was in flight is asked again


async def test_two_lanes_never_have_one_job(bench, fake) -> None:
    batch = await bench.submit(*[CHAT | {"max_tokens": 2}] * 20)
    async with bench.lane("one").running(), bench.lane("two").running():
        await bench.ended(batch.id)
    assert len(fake.requests) == 20


async def test_the_lane_waits_while_somebody_waits(bench, fake) -> None:
    bench.queued = 1
    batch = await bench.submit(CHAT)
    async with bench.lane().running():
        await asyncio.sleep(0.2)
        assert fake.requests == []
        bench.queued = 0
        await bench.ended(batch.id)


async def test_a_cancelled_batch_keeps_what_it_had(bench, fake, monkeypatch) -> None:
    monkeypatch.setattr(held_job, "FRESH_S", 0.0)  # all lines may end within the time for which a look counts
    fake.first_token.clear()
    batch = await bench.submit(*[CHAT | {"max_tokens": 5}] * 60)
    async with bench.lane().running():
        while not fake.requests:
            await asyncio.sleep(0.01)
        assert (asked := await bench.openai.batches.cancel(batch.id)).status == "cancelling"
        fake.first_token.set()
        done = await bench.ended(batch.id)
    assert (done.status, done.cancelling_at) == ("cancelled", asked.cancelling_at or "none")
    assert 0 < done.request_counts.completed < 60


async def test_lines_under_way_of_a_cancelled_batch_end_within_a_grace(bench, fake, monkeypatch) -> None:
    monkeypatch.setattr(batch_lane, "GRACE_S", 0.1)
    fake.first_token.clear()  # their answers never begin
    batch = await bench.submit(*[CHAT] * 12)
    async with bench.lane().running():
        while len(fake.requests) < batch_lane.AT_ONCE:
            await asyncio.sleep(0.01)
        await bench.openai.batches.cancel(batch.id)
        assert (await bench.openai.batches.retrieve(batch.id)).status == "cancelling"
        async with asyncio.timeout(20):
            done = await bench.ended(batch.id)
        assert (done.status, done.request_counts.completed, done.output_file_id) == ("cancelled", 0, None)
        assert (len(fake.requests), fake.running) == (batch_lane.AT_ONCE, set())
        fake.first_token.set()
        assert (await bench.ended((await bench.submit(CHAT)).id)).status == "completed"


async def test_what_may_pass_is_tried_again(bench, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.api.batch.attempts.FIRST_PAUSE_S", 0.01)
    opened, full = fake.open, [Overloaded("full", retry_after_s=0.01)] * 2

    def open_later(request):
        if full:
            raise full.pop()
        return opened(request)

    fake.open = open_later
    batch = await bench.submit(CHAT)
    async with bench.lane().running():
        assert (await bench.ended(batch.id)).request_counts.completed == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no requests"),
        (b"{", "line 1"),
        (b'{"custom_id": "a", "method": "GET", "url": "/x", "body": {}}', "POST"),
    ],
)
async def test_a_bad_file_fails_its_batch_before_anything_runs(bench, content, says) -> None:
    file = await bench.openai.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await bench.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert batch.status == "failed"
    assert says in batch.errors.data[0].message
    await bench.openai.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        await bench.openai.files.retrieve(file.id)


async def test_a_job_whose_input_is_gone_fails_and_says_so(bench) -> None:
    batch = await bench.submit(CHAT)
    await bench.openai.files.delete(batch.input_file_id)
    async with bench.lane().running():
        done = await bench.ended(batch.id)
    assert (done.status, done.errors.data[0].code) == ("failed", "input_gone")
    assert await bench.store.open_jobs() == []


async def test_a_job_that_fails_again_and_again_holds_up_none_behind_it(bench) -> None:
    bad, good = await bench.submit(CHAT), await bench.submit(CHAT)
    broken = msgspec.structs.replace(await bench.store.job(bad.id), id="batch_0", key="{")  # the first in order
    await bench.store.put(broken, is_open=True)
    async with bench.lane().running():
        assert (await bench.ended(good.id)).status == "completed"
    assert "batch_0" in await bench.store.open_jobs()


async def test_a_line_that_the_router_stumbles_over_fails_alone(bench, monkeypatch) -> None:
    async def answer(service, line, request_id):
        if line.custom_id == "r0":
            raise ZeroDivisionError
        return await answer_line(service, line, request_id)

    monkeypatch.setattr("baton.router.api.batch.attempts.answer_line", answer)
    batch = await bench.submit(CHAT, CHAT)
    async with bench.lane().running():
        done = await bench.ended(batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert "failed on this line" in (await bench.lines(done.error_file_id))[0]["error"]["message"]


async def test_a_rate_that_is_used_up_is_waited_for(bench) -> None:
    quotas = msgspec.structs.replace(bench.service.quotas, gate=Full())
    bench.service = msgspec.structs.replace(bench.service, quotas=quotas)
    batch = await bench.submit(CHAT)
    async with bench.lane().running():
        done = await bench.ended(batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)


async def test_a_batch_that_was_sent_with_a_key_is_answered_for_it(fake, model_dir, redis, tmp_path) -> None:
    path = tmp_path / "keys.json"
    text = add_key(path, "acme", 0.0)
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0, max_stored_bytes=100_000)
    store, gate = BatchStore(redis, "t"), AccessGate(KeyRing(path, lambda: 0.0))
    service = generation_of(config, fake, ModelCatalog(fake.models, {"tiny": model_dir}), gate)
    async with running_router(config, surfaces_of(config, service, store)) as address:
        clients = Clients(address)
        clients.openai.api_key = text
        bench = Bench(clients, service, store)
        batch = await bench.submit(CHAT)
        assert json.loads((await store.job(batch.id)).key)["hash"] not in path.read_text()
        async with bench.lane().running():
            done = await bench.ended(batch.id)
        await clients.close()
    assert (done.status, done.request_counts.completed) == ("completed", 1)


async def test_a_batch_whose_key_is_revoked_goes_no_further(fake, model_dir, redis, tmp_path) -> None:
    path = tmp_path / "keys.json"
    text = add_key(path, "acme", 0.0)
    gate = AccessGate(KeyRing(path, itertools.count(0, 10).__next__))
    key, line = gate.identify(f"Bearer {text}").key, {"method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    lines = [line | {"custom_id": f"r{n}"} for n in range(20)]
    content = b"\n".join(msgspec.json.encode(line) for line in lines)
    store = BatchStore(redis, "t")
    service = generation_of(RouterConfig(), fake, ModelCatalog(fake.models, {"tiny": model_dir}), gate)
    await store.add_file(StoredFile("file-1", "acme", "x", "batch", len(content), 1), content)
    job = BatchJob(
        "batch_1", "acme", "/v1/chat/completions", "file-1", "24h", 20, 1, msgspec.json.encode(noted(key)).decode()
    )
    await store.put(job, is_open=True)
    valid = True
    lane = BatchLane(service, store, "one", lambda model_id: not (valid and len(fake.requests) > 2))
    working = asyncio.create_task(lane.work("batch_1"))
    while len(fake.requests) < 3:
        await asyncio.sleep(0.01)
    revoke_key(path, key.id)
    valid = False
    await working
    ended = await store.job("batch_1")
    assert (ended.status, [error["code"] for error in ended.errors]) == ("failed", ["unauthenticated"])
    assert 1 <= ended.completed < 20
    assert ended.output_file, "what was answered until then is there"
