"""Tests who comes in by which surface, and how much of it: 401, 403 and 429 as clients of OpenAI know them."""

from __future__ import annotations

import grpc
import openai
import pytest

from baton.cluster.config import RouterConfig
from baton.protos.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Forbidden,
    NoWorker,
    Overloaded,
    QuotaExceeded,
    WorkerLost,
)
from baton.protos.nouns import Sampling, TokenRun
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as pb_grpc
from baton.protos.v1 import worker_pb2 as w
from baton.router.access.caller import Caller
from baton.router.access.gate import AccessGate
from baton.router.access.keys import ApiKey, KeyRing, add_key
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.stream import open_answer
from baton.router.api.access import is_open
from baton.router.observe.decisions import DecisionLog
from baton.router.request.context import RequestContext
from baton.router.text.catalog import ModelCatalog
from tests.router.parts import generation_of

COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 4}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Shared:
    """Shared buckets that answer as told."""

    def __init__(self, answer: float | None) -> None:
        self.answer, self.asked, self.spends = answer, [], []

    async def take(self, costs):
        self.asked.append(costs)
        return self.answer

    async def spend(self, costs):
        self.spends.append(costs)


def caller(**fields) -> Caller:
    return Caller(key=ApiKey("k1", "acme", "h", **fields))


async def test_a_rate_refills_and_an_overdrawn_bucket_waits():
    clock = Clock()
    gate = AccessGate(None, clock)
    who = caller(requests_per_min=2, tokens_per_min=600)
    await gate.charge(who.key, "m", 1, 100)
    gate.spent(who.key, 550)
    await gate.settle()
    with pytest.raises(QuotaExceeded) as refused:
        await gate.charge(who.key, "m", 1, 100)
    assert refused.value.retry_after_s == pytest.approx(15, abs=0.1)  # 50 overdrawn, 100 asked, 10 a second
    clock.now += 15.1
    await gate.charge(who.key, "m", 1, 100)
    with pytest.raises(QuotaExceeded):
        await gate.charge(who.key, "m", 2, 1)


async def test_the_time_before_an_answer_ended_does_not_pay_for_it():
    clock = Clock()
    gate, who = AccessGate(None, clock), caller(tokens_per_min=600)
    await gate.charge(who.key, "m", 1, 1)
    clock.now += 3600
    gate.spent(who.key, 1_200)
    await gate.settle()
    with pytest.raises(QuotaExceeded) as refused:
        await gate.charge(who.key, "m", 1, 100)
    assert refused.value.retry_after_s == pytest.approx(70, abs=0.1)  # 600 overdrawn, 100 asked, 10 a second


async def test_a_prompt_over_the_whole_rate_waits_for_a_full_bucket_and_then_goes():
    clock = Clock()
    gate, who = AccessGate(None, clock), caller(tokens_per_min=60)
    await gate.charge(who.key, "m", 1, 1000)
    with pytest.raises(QuotaExceeded):
        await gate.charge(who.key, "m", 1, 1)
    clock.now += 941 + 1
    await gate.charge(who.key, "m", 1, 1)


async def test_the_shared_store_counts_and_this_process_does_when_it_is_away():
    who = caller(requests_per_min=1)
    busy = AccessGate(None, Clock(), Shared(2.5))
    with pytest.raises(QuotaExceeded, match=r"2\.5 s"):
        await busy.charge(who.key, "m", 1, 1)
    away = AccessGate(None, Clock(), Shared(None))
    await away.charge(who.key, "m", 1, 1)
    with pytest.raises(QuotaExceeded):
        await away.charge(who.key, "m", 1, 1)


async def test_what_is_refunded_can_be_used_again_and_fills_no_bucket_over_its_rim():
    gate, who = AccessGate(None, Clock()), caller(requests_per_min=2, tokens_per_min=600)
    for _ in range(5):
        await gate.charge(who.key, "m", 2, 600)
        gate.refund(who.key, 2, 600)
        gate.spent(who.key, 0)
        await gate.settle()
    gate.refund(who.key, 2, 600)
    await gate.settle()
    await gate.charge(who.key, "m", 2, 600)
    with pytest.raises(QuotaExceeded):
        await gate.charge(who.key, "m", 0, 1)


async def test_the_shared_store_is_given_back_what_was_taken_beside_what_answers_used():
    shared = Shared(0.0)
    gate, who = AccessGate(None, Clock(), shared), caller(requests_per_min=2, tokens_per_min=600)
    gate.refund(who.key, 1, 100)
    gate.spent(who.key, 30)
    await gate.settle()
    assert shared.spends == [{"requests:k1": (2, -1), "tokens:k1": (600, -70)}]
    gate.refund(None, 1, 100)
    gate.refund(caller().key, 1, 100)
    await gate.settle()
    assert len(shared.spends) == 1


async def test_a_key_for_one_model_opens_no_other():
    await AccessGate().charge(caller(models=("m",)).key, "m", 1, 1)
    with pytest.raises(Forbidden):
        await AccessGate().charge(caller(models=("m",)).key, "other", 1, 1)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.json"
    made = {
        "acme": add_key(path, "acme", 0.0, requests_per_min=2, priority=3),
        "other": add_key(path, "other", 0.0, models=("elsewhere",)),
    }
    return made, AccessGate(KeyRing(path, Clock()), Clock())


def test_nobody_is_asked_for_a_key_at_the_open_paths_alone():
    assert all(map(is_open, ("/", "/health", "/metrics", "/dashboard", "/dashboard/", "/dashboard/page.js")))
    closed = ("/healthz", "/metrics/x", "/dashboards", "/dashboard-data", "/dashboard.json", "/v1/models")
    assert not any(map(is_open, closed))


async def test_rest_wants_a_key_and_says_so_as_openai_does(fake, model_dir, start_router, keys):
    made, gate = keys
    async with start_router(fake, {"tiny": model_dir}, gate=gate) as c:
        for header in ({}, {"authorization": "Basic x"}, {"authorization": "Bearer bt-wrong"}):
            refused = await c.http.post("/v1/completions", json=COMPLETION, headers=header)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["x-request-id"]
        assert (await c.http.get("/v1/models")).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await c.http.get(path)).status_code == 200
        assert fake.requests == []

        good = openai.AsyncOpenAI(base_url=f"{c.address.url}/v1", api_key=made["acme"], max_retries=0)
        await good.completions.create(**COMPLETION, extra_body={"priority": -9, "cache_salt": "mine"})
        await good.completions.create(**COMPLETION, extra_body={"priority": 2})
        first, second = fake.requests
        assert (first.context.tenant, first.context.priority, second.context.priority) == ("acme", 3, 5)
        assert first.context.tenant_salt == second.context.tenant_salt + b"mine"
        assert len(second.context.tenant_salt) == 16
        with pytest.raises(openai.RateLimitError) as limited:
            await good.completions.create(**COMPLETION)
        assert limited.value.code == "rate_limit_exceeded"
        assert int(limited.value.response.headers["retry-after"]) == 30
        other = openai.AsyncOpenAI(base_url=f"{c.address.url}/v1", api_key=made["other"], max_retries=0)
        with pytest.raises(openai.PermissionDeniedError):
            await other.completions.create(**COMPLETION)
        shown = (await c.http.get("/metrics")).text
        refused = {"unauthenticated": 4, "quota_exceeded": 1, "forbidden": 1}
        for cause, count in refused.items():
            assert f'baton_requests_refused_total{{cause="{cause}"}} {count}.0' in shown


async def test_grpc_wants_the_same_key(fake, model_dir, start_router, keys):
    made, gate = keys
    async with start_router(fake, {"tiny": model_dir}, gate=gate) as c:
        stub = pb_grpc.InferenceStub(c.channel)
        ask = pb.GenerateRequest(model="tiny", text="x")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(ask)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.GenerateStream(ask, metadata=(("authorization", "Bearer no"),)):
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {made['acme']}"), ("x-slo-ttft-ms", "250"), ("x-request-id", "mine"))
        await stub.Generate(ask, metadata=metadata)
        [request] = fake.requests
        assert (request.context.tenant, request.context.slo_ttft_s, request.context.asked_id) == (
            "acme",
            0.25,
            "mine",
        )


async def test_slos_come_in_headers_and_nonsense_is_refused(router, fake):
    headers = {"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "25.5", "x-request-id": "mine"}
    done = await router.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert done.headers["x-request-id"] == "mine"
    [request] = fake.requests
    assert (request.context.slo_ttft_s, request.context.slo_tpot_s, request.context.asked_id) == (
        0.2,
        0.0255,
        "mine",
    )
    for bad in ("soon", "0", "-1", "nan", "1e12"):
        refused = await router.http.post("/v1/completions", json=COMPLETION, headers={"x-slo-ttft-ms": bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
CHARGED = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": [[5] * 10, [6] * 10]}),
    ("/v2/models/tiny/generate", {"text_input": "x"}),
    ("/v2/models/tiny/infer", {"inputs": [TENSOR]}),
]


@pytest.mark.parametrize(("path", "body"), CHARGED)
@pytest.mark.parametrize("rate", [{"requests_per_min": 1}, {"tokens_per_min": 1}])
async def test_every_way_to_ask_is_charged_and_a_refusal_is_kept(
    fake, model_dir, start_router, tmp_path, path, body, rate
):
    made = add_key(tmp_path / "keys.json", "acme", 0.0, **rate)
    gate, log = AccessGate(KeyRing(tmp_path / "keys.json", Clock()), Clock()), DecisionLog("r", lambda: 0.0)
    headers = {"authorization": f"Bearer {made}"}
    async with start_router(fake, {"tiny": model_dir}, gate=gate, decisions=log) as c:
        assert (await c.http.post(path, json=body, headers=headers)).status_code == 200
        refused = await c.http.post(path, json=body, headers=headers)
        assert refused.status_code == 429, refused.text
        assert int(refused.headers["retry-after"]) >= 1
        name = refused.headers["x-request-id"]
        record = (await c.http.get(f"/v1/requests/{name}/explain", headers=headers)).json()
        assert record["choices"][0]["error"].startswith("quota_exceeded: the key's rate")
        assert (record["state"], record["tenant"]) == ("over", "acme")


async def left_after(fake, model_dir, start_router, tmp_path, path, body, refusal, tokens=0):
    """Asks twice while dispatch answers ``refusal`` after ``tokens``; returns the statuses then and afterwards."""
    made = add_key(tmp_path / "keys.json", "acme", 0.0, requests_per_min=2, tokens_per_min=60)
    gate = AccessGate(KeyRing(tmp_path / "keys.json", Clock()), Clock())
    async with start_router(fake, {"tiny": model_dir}, gate=gate) as c:
        c.http.headers["authorization"] = f"Bearer {made}"
        statuses = []
        for asked in range(3):
            refused = None if asked == 2 else refusal
            fake.refuse, fake.fail_after = (refused, None) if tokens < 0 else (None, refused and (tokens, refused))
            answer = await c.http.post(path, json={"model": "tiny", **body})
            statuses.append(answer.status_code)
            await fake.idle()
            await gate.settle()
        return statuses


@pytest.mark.parametrize(("path", "body"), CHARGED)
async def test_what_dispatch_refuses_is_given_back(fake, model_dir, start_router, tmp_path, path, body):
    refusal = Overloaded("full", retry_after_s=1.0)
    statuses = await left_after(fake, model_dir, start_router, tmp_path, path, body, refusal, tokens=-1)
    assert statuses == [429, 429, 200]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "tokens", "statuses"),
    [
        (NoWorker("none is there"), 0, [503, 503, 200]),
        (ContextTooLong("too long for the workers"), 0, [400, 400, 200]),
        (DeadlineExceeded("too late"), 0, [504, 504, 429]),
        (WorkerLost("it died"), 1, [503, 503, 429]),
    ],
)
async def test_what_ends_before_its_first_token_is_given_back_unless_it_is_the_callers_doing(
    fake, model_dir, start_router, tmp_path, refusal, tokens, statuses, stream
):
    body = COMPLETION | {"stream": stream}
    found = await left_after(fake, model_dir, start_router, tmp_path, "/v1/completions", body, refusal, tokens)
    assert found == ([200 if tokens and stream and s == 503 else s for s in statuses])


async def test_of_a_call_with_several_prompts_those_that_nobody_began_are_given_back(fake, model_dir):
    shared = Shared(0.0)
    gate, who = AccessGate(None, Clock(), shared), caller(requests_per_min=9, tokens_per_min=900)
    catalog = ModelCatalog(fake.models, {"tiny": model_dir})
    service = generation_of(RouterConfig(), fake, catalog, gate)
    entry, prompts = await catalog.resolve("tiny"), ((5,), (5, 6), (5, 6, 7))
    options, context = GenerationOptions({}, n=2), RequestContext(key=who.key)
    generation = Generation("r", entry, options, prompts, (Sampling(),) * 3, context=context)
    fake.first_token.clear()
    with open_answer(service, generation, catalog.text(entry)) as answer:
        answer.choices[0].stream.push(TokenRun(0, (5,)))
        answer.choices[3].stream.fail(NoWorker("none is there"))
        with pytest.raises(NoWorker):
            _ = [piece async for piece in answer]
    fake.first_token.set()
    await fake.idle()
    await gate.settle()
    assert shared.spends == [
        {"requests:k1": (9, -5), "tokens:k1": (900, -5)}
    ]  # one choice of the first prompt stands


@pytest.mark.parametrize(
    ("key", "asked", "wire"),
    [
        (2**31 - 1, 5, 2**31 - 1),
        (10, 2**31 - 1, 2**31 - 1),
        (-(2**40), -1, -(2**31)),
        (3, -9, 3),
        (2**40, 0, 2**31 - 1),
    ],
)
def test_a_priority_beyond_32_bits_is_the_last_or_the_first_there_is(key, asked, wire):
    who = caller(priority=key)
    assert who.priority(asked) == wire
    assert w.Admit(priority=who.priority(asked)).priority == wire


async def test_the_tokenizer_is_charged_to_the_keys_rates(start_router, fake, model_dir, tmp_path) -> None:
    path = tmp_path / "keys.json"
    text = add_key(path, "acme", 1.0, requests_per_min=3)
    gate = AccessGate(KeyRing(path, Clock()), Clock())
    async with start_router(fake, {"tiny": model_dir}, gate=gate) as clients:
        clients.http.headers["authorization"] = f"Bearer {text}"
        for path_, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            assert (await clients.http.post(path_, json=body)).status_code == 200
        asked = pb.TokenizeRequest(model="tiny", text="x")
        metadata = (("authorization", f"Bearer {text}"),)
        await pb_grpc.InferenceStub(clients.channel).Tokenize(asked, metadata=metadata)
        refused = await clients.http.post("/tokenize", json={"prompt": "x"})
        assert refused.status_code == 429
