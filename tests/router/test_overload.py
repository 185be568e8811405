"""Overload as a client meets it: HTTP before the real dispatcher, with workers that speak gRPC."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager

import grpc
import httpx
import msgspec
import pytest

from baton.protos.errors import WorkerLost
from baton.protos.v1 import common_pb2
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as pb_grpc
from baton.protos.v1 import open_inference_pb2 as oip
from baton.protos.v1 import open_inference_pb2_grpc as oip_grpc
from baton.router.dispatch.fair_queue import LOOK_AHEAD
from tests.router.conftest import Clients, router_before
from tests.router.fake_workers import PATIENT, Cluster, cluster, until

BODY = {"model": "m", "prompt": [1] * 40, "max_tokens": 4}
URL = "/v1/completions"


@asynccontextmanager
async def served(prefill: int = 0, decode: int = 1, max_queue: int = 100, inflight: int = 1 << 30, **fields):
    """A cluster and the router's REST surface before it."""
    async with cluster(
        prefill, decode, policy="cost", max_queue=max_queue, max_inflight_bytes=inflight, **fields
    ) as c:
        sources = {"m": None}
        async with router_before(c.dispatcher, sources, decisions=c.core.decisions) as clients:
            yield c, clients


def refused(response: httpx.Response, status: int, code: str) -> float:
    """Asserts that ``response`` is that refusal; returns the seconds after which the client should come back."""
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    seconds = int(response.headers["retry-after-ms"]) / 1000
    assert int(response.headers["retry-after"]) >= seconds
    return seconds


async def reason(clients: Clients, response: httpx.Response) -> str:
    """Returns the error that `baton explain` gives for the request, whose record may be closed after its answer."""
    async with asyncio.timeout(30):
        while True:
            found = await clients.http.get(f"/v1/requests/{response.headers['x-request-id']}/explain")
            assert found.status_code == 200, found.text
            if (record := found.json())["state"] == "over":
                return record["choices"][0]["error"]


async def fill(c: Cluster, clients: Clients, waiting: int, **fields) -> list[asyncio.Task[httpx.Response]]:
    """One request that runs and holds on a worker with one seat, and ``waiting`` in the queue."""
    c.d[0].hold_tokens.clear()
    tasks = [asyncio.create_task(clients.http.post(URL, json=BODY))]
    await until(lambda: len(c.d[0].leases) == 1)
    for n in range(1, waiting + 1):
        tasks.append(asyncio.create_task(clients.http.post(URL, json=BODY | fields)))
        await until(lambda n=n: c.dispatcher.queued() == n)
    return tasks


async def test_a_full_queue_turns_the_next_away_with_a_time_and_a_record() -> None:
    async with served(max_queue=2, max_batch=1) as (c, clients):
        tasks = await fill(c, clients, 2)
        late = await clients.http.post(URL, json=BODY)
        assert refused(late, 429, "overloaded") >= 1
        assert (await reason(clients, late)).startswith(
            "overloaded: the queue of context class 'short' for 'm' is full (2 requests"
        )
        shown = (await clients.http.get("/metrics")).text
        assert re.search(r'baton_requests_total{context_class="short",model="\w+",outcome="overloaded"} 1.0', shown)
        c.d[0].hold_tokens.set()
        assert {r.status_code for r in await asyncio.gather(*tasks)} == {200}


async def test_overload_sheds_the_least_valuable_whoever_came_first() -> None:
    async with served(max_queue=2, max_batch=1) as (c, clients):
        running, first, second = await fill(c, clients, 2, priority=5)
        urgent = asyncio.create_task(clients.http.post(URL, json=BODY | {"priority": -5}))
        shed = await second
        refused(shed, 429, "overloaded")
        assert "overloaded" in await reason(clients, shed)
        c.d[0].hold_tokens.set()
        assert [(await t).status_code for t in (running, first, urgent)] == [200] * 3


async def test_prompts_and_answers_in_flight_are_bounded_in_bytes() -> None:
    async with served(inflight=3 * 64 * 44, max_batch=1) as (c, clients):  # 40 tokens in and 4 out, 64 bytes each
        tasks = await fill(c, clients, 2)
        over = await clients.http.post(URL, json=BODY)
        refused(over, 429, "overloaded")
        assert "max_inflight_bytes" in await reason(clients, over)
        c.d[0].hold_tokens.set()
        assert {r.status_code for r in await asyncio.gather(*tasks)} == {200}
        assert (await clients.http.post(URL, json=BODY)).status_code == 200


async def test_one_that_could_never_be_held_is_refused_for_good_by_the_limits_name() -> None:
    async with served(inflight=2 * 64 * 44, max_batch=1) as (_, clients):
        never = await clients.http.post(URL, json=BODY | {"n": 16, "max_tokens": 32})
        assert (never.status_code, never.json()["error"]["code"]) == (413, "request_too_large")
        assert "router.max_inflight_bytes" in never.json()["error"]["message"]
        assert "max_tokens" in never.json()["error"]["message"]
        assert "retry-after" not in never.headers
        assert "request_too_large" in await reason(clients, never)
        assert (await clients.http.post(URL, json=BODY)).status_code == 200


async def test_a_body_that_could_never_be_held_is_refused_for_good(start_router, fake, model_dir) -> None:
    async with start_router(fake, {"tiny": model_dir}, max_inflight_bytes=1 << 20) as clients:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "user": "u" * (1 << 20)}
        never = await clients.http.post(URL, json=body)
        assert (never.status_code, never.json()["error"]["code"]) == (413, "body_too_large")
        assert "router.max_inflight_bytes" in never.json()["error"]["message"]
        assert (await clients.http.post(URL, json=body | {"user": "u"})).status_code == 200


async def test_bodies_count_while_they_come_in_and_until_they_are_answered(start_router, fake, model_dir) -> None:
    async with start_router(fake, {"tiny": model_dir}, max_inflight_bytes=1 << 20) as clients:
        fake.first_token.clear()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "user": "u" * 700_000}
        held = asyncio.create_task(clients.http.post(URL, json=body))
        await fake.opened.wait()
        over = await clients.http.post(URL, json=body)
        assert refused(over, 429, "overloaded") == 1
        assert "bodies in flight" in over.json()["error"]["message"]
        fake.first_token.set()
        assert (await held).status_code == 200
        assert (await clients.http.post(URL, json=body)).status_code == 200


async def test_messages_of_grpc_count_among_the_bodies(start_router, fake, model_dir) -> None:
    async with start_router(fake, {"tiny": model_dir}, max_inflight_bytes=1 << 20) as clients:
        fake.first_token.clear()
        long, one = "u" * 700_000, common_pb2.Sampling(max_tokens=1)
        asked = pb.GenerateRequest(model="tiny", text="x", request_id=long, sampling=one)
        tensor = oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"x")
        tensors = oip.ModelInferRequest(model_name="tiny", id=long, inputs=[tensor])
        stub, kserve = pb_grpc.InferenceStub(clients.channel), oip_grpc.GRPCInferenceServiceStub(clients.channel)
        ways = [
            lambda: stub.Generate(asked),
            lambda: stub.GenerateStream(asked).read(),
            lambda: kserve.ModelInfer(tensors),
            lambda: kserve.ModelStreamInfer(iter([tensors])).read(),
        ]
        for way in ways:
            fake.opened.clear()
            fake.first_token.clear()
            held = asyncio.ensure_future(way())
            await fake.opened.wait()
            for other in ways:
                with pytest.raises(grpc.aio.AioRpcError, match="bodies in flight") as over:
                    await other()
                assert over.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            body = {"model": "tiny", "prompt": "x", "user": long}
            refused(await clients.http.post(URL, json=body), 429, "overloaded")
            fake.first_token.set()
            await held
            await fake.idle()


async def test_one_that_would_miss_its_slo_is_refused_and_served_when_it_comes_back_as_told() -> None:
    async with served(max_batch=1) as (c, clients):
        c.d[0].pace_s = 0.02  # about 12 requests a second
        load = [asyncio.create_task(clients.http.post(URL, json=BODY)) for _ in range(24)]
        await until(lambda: 10 <= c.dispatcher.queued() <= 14, 30)  # a pace is known
        slo = {"x-slo-ttft-ms": "400"}
        early = await clients.http.post(URL, json=BODY, headers=slo)
        told = refused(early, 429, "overloaded")
        assert "would wait" in await reason(clients, early)
        await asyncio.sleep(told)
        begun = time.monotonic()
        again = await clients.http.post(URL, json=BODY, headers=slo)
        while again.status_code == 429:  # the machine was slower than its own pace: it must say how much is left
            await asyncio.sleep(refused(again, 429, "overloaded") + 0.2)
            again = await clients.http.post(URL, json=BODY, headers=slo)
        assert again.status_code == 200, (told, time.monotonic() - begun, again.text)
        assert {r.status_code for r in await asyncio.gather(*load)} == {200}


async def test_one_that_can_no_longer_come_in_time_is_refused_then_however_deep_in_the_queue() -> None:
    async with served(max_batch=1) as (c, clients):
        tasks = await fill(c, clients, LOOK_AHEAD + 4)
        late = await asyncio.wait_for(clients.http.post(URL, json=BODY, headers={"x-slo-ttft-ms": "300"}), 20)
        refused(late, 429, "overloaded")
        assert "no worker was free within the 0.3 s" in await reason(clients, late)
        assert c.dispatcher.queued() == LOOK_AHEAD + 4
        c.d[0].hold_tokens.set()
        assert {r.status_code for r in await asyncio.gather(*tasks)} == {200}


async def test_a_deadline_that_passes_in_the_queue_is_told_and_kept() -> None:
    async with served(max_batch=1) as (c, clients):
        tasks = await fill(c, clients, 0)
        late = await clients.http.post(URL, json=BODY, headers={"x-request-timeout": "0.1"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (await reason(clients, late)).startswith("deadline_exceeded")
        c.d[0].hold_tokens.set()
        await asyncio.gather(*tasks)


async def test_no_worker_and_a_lost_one_are_503_with_a_record() -> None:
    settings = msgspec.structs.replace(PATIENT, worker_wait_s=0.3)
    async with served(prefill=1, decode=1, settings=settings) as (c, clients):
        c.d[0].end_with = [WorkerLost("gone")] * 3
        lost = await clients.http.post(URL, json=BODY)
        refused(lost, 503, "worker_lost")
        assert "worker_lost" in await reason(clients, lost)
        await c.d[0].die()
        await until(lambda: c.view.reachable("decode") == 0)
        nobody = await clients.http.post(URL, json=BODY)
        assert refused(nobody, 503, "no_worker") == 1
        assert "no_worker" in await reason(clients, nobody)
        unknown = await clients.http.post(URL, json=BODY | {"model": "no such"})
        assert unknown.status_code == 404


async def test_steps_over_their_slo_shrink_what_a_worker_gets_at_once() -> None:
    async with served(max_batch=16) as (c, clients):
        c.d[0].pace_s = 0.02
        headers = {"x-slo-tpot-ms": "5"}

        async def wave(at_once: int = 0) -> int:
            c.d[0].most = 0
            c.d[0].hold_tokens.clear()
            asked = [asyncio.create_task(clients.http.post(URL, json=BODY, headers=headers)) for _ in range(12)]
            await until(lambda: len(c.d[0].leases) >= at_once)
            c.d[0].hold_tokens.set()
            assert {r.status_code for r in await asyncio.gather(*asked)} == {200}
            return c.d[0].most

        assert await wave(at_once=12) == 12, "nobody knows yet how long a step takes"
        seen: list[int] = []
        while not seen or seen[-1] > 8:
            assert len(seen) < 60, seen
            seen.append(await wave())
