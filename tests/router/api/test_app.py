"""The REST surface on the wire: SSE bytes, errors, limits, headers, and clients that go away."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import subprocess
import sys
import time

import httpx
import pytest

from baton.cluster.config import RouterConfig
from baton.protos.errors import ConfigError, NoWorker, Overloaded
from baton.router.answer.grammar_check import GrammarCheck
from baton.router.answer.quotas import Quotas
from baton.router.server import running_router
from baton.router.text.catalog import ModelCatalog
from tests.router.parts import generation_of, surfaces_of

COMPLETION = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_metrics_count_what_clients_saw(router, fake) -> None:
    await router.http.post("/v1/completions", json=COMPLETION | {"max_tokens": 5, "n": 2})
    fake.refuse = Overloaded("full")
    await router.http.post("/v1/completions", json=COMPLETION)
    found = (await router.http.get("/metrics")).text
    labels = 'context_class="short",model="tiny"'
    assert f'baton_requests_total{{{labels},outcome="length"}} 1.0' in found, "two choices of one request"
    assert f"baton_output_tokens_total{{{labels}}} 10.0" in found
    assert 'baton_requests_total{context_class="short",model="tiny",outcome="overloaded"} 1.0' in found
    assert f"baton_output_tokens_total{{{labels}}} 10.0" in found
    assert f"baton_prompt_tokens_total{{{labels}}} 2.0" in found
    assert f"baton_time_to_first_token_seconds_count{{{labels}}} 2.0" in found


async def test_a_client_may_shorten_the_deadline(router, fake) -> None:
    for said in ("5", "1e9"):
        await router.http.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout": said})
    short, most = (request.context.deadline for request in fake.requests)
    assert 500 < most - short < 800  # 595, and the time between the two
    bad = await router.http.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout": "soon"})
    assert (bad.status_code, error_of(bad)["param"]) == (400, "x-request-timeout")


async def never_checked(check: GrammarCheck, *asked: object) -> None:
    """Takes the place of a check that waits for ever."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_deadline_counts_while_a_grammar_is_checked(
    router, fake, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarCheck, "check", never_checked)
    said = [{"role": "user", "content": "a"}]
    asked = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": said},
        "/v1/messages": {"messages": said, "max_tokens": 4},
        "/v1/responses": {"input": said},
    }[path]
    body = {"model": "tiny", "structured_outputs": {"regex": "a+"}} | asked
    response = await router.http.post(path, json=body, headers={"x-request-timeout": "0.05"})
    assert response.status_code == 504, response.text
    assert "deadline" in response.text
    assert not fake.requests


async def test_a_request_that_is_late_before_it_is_charged_costs_its_key_nothing(
    router, fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[object] = []

    async def charge(quotas: Quotas, generation: object) -> None:
        charged.append(generation)

    async def slow(check: GrammarCheck, *asked: object) -> None:
        time.sleep(0.06)  # gives no other task a turn, so that no timer ends it

    monkeypatch.setattr(GrammarCheck, "check", slow)
    monkeypatch.setattr(Quotas, "charge", charge)
    body = COMPLETION | {"structured_outputs": {"regex": "a+"}}
    response = await router.http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.05"})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert not charged
    assert not fake.requests


async def test_before_any_worker_came_a_request_is_503_not_404(router, fake) -> None:
    fake.served = ()
    response = await router.http.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, error_of(response)["code"]) == (503, "no_worker")


async def test_a_stream_is_events_of_json_and_a_done(router) -> None:
    response = await router.http.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "usage" not in chunks[0]


async def test_a_failed_stream_ends_with_an_error_and_no_done(router, fake) -> None:
    fake.fail_after = (2, NoWorker("nobody left"))
    response = await router.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "no_worker"


async def test_unknown_fields_are_tolerated_and_an_absent_model_is_the_only_one(router) -> None:
    response = await router.http.post("/v1/completions", json={"prompt": "x", "user": "me", "frobnicate": {"a": 1}})
    assert response.status_code == 200
    assert response.json()["model"] == "tiny"


async def test_the_way_a_request_took_is_in_a_header(router) -> None:
    response = await router.http.post("/v1/completions", json=COMPLETION)
    assert response.headers["x-baton-route"].startswith("way=prefill; class=short; prefill=p0")


async def test_request_ids_are_echoed_or_made_and_never_reach_dispatch(router, fake) -> None:
    mine = await router.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine-1"})
    odd = await router.http.get("/health", headers={"x-request-id": "a b"})
    assert mine.headers["x-request-id"] == "mine-1"
    assert re.fullmatch(r"[0-9a-f]{24}", odd.headers["x-request-id"])
    assert fake.requests[0].request_id != "mine-1"


async def test_a_traceparent_reaches_dispatch_unless_it_is_malformed(router, fake) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for header in (parent, "junk"):
        await router.http.post("/v1/completions", json=COMPLETION, headers={"traceparent": header})
    assert [request.context.traceparent for request in fake.requests] == [parent, ""]


async def test_errors_of_http_itself_have_openais_shape(router) -> None:
    missing = await router.http.get("/v1/nothing")
    wrong = await router.http.get("/v1/completions")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 9999])
async def test_a_body_that_is_no_json_object_is_a_400(router, body: bytes) -> None:
    response = await router.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"])
async def test_a_compressed_body_is_refused_by_its_header(router, path: str) -> None:
    body = gzip.compress(b'{"model": "tiny", "prompt": "a"}')
    for coding in ("gzip", "identity"):
        answer = await router.http.post(path, content=body, headers={"content-encoding": coding})
        assert answer.status_code == 400
        assert ("content-encoding is 'gzip'" in answer.text) == (coding == "gzip")


async def test_a_declared_length_over_the_limit_is_refused_unread(router) -> None:
    response = await router.http.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 70000})
    assert response.status_code == 413
    assert "router.max_body_bytes" in error_of(response)["message"]
    assert (await router.http.get("/health")).status_code == 200


async def test_an_undeclared_body_is_refused_while_it_comes_in(router) -> None:
    reader, writer = await asyncio.open_connection(router.address.host, router.address.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(5):  # 80 KiB of an endless body, limit 64 KiB
        writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
    async with asyncio.timeout(20):
        status = await reader.readline()
    assert b" 413 " in status
    writer.close()


async def test_a_full_queue_is_429_with_a_retry_after(router, fake) -> None:
    fake.refuse = Overloaded("the queue of class short is full", retry_after_s=2.3)
    response = await router.http.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert error_of(response)["type"] == "rate_limit_error"


async def test_no_worker_is_503_with_a_retry_after_and_ready_says_so(router, fake) -> None:
    fake.refuse, fake.is_ready = NoWorker("no decode worker"), False
    for response in (await router.http.post("/v1/completions", json=COMPLETION), await router.http.get("/ready")):
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert error_of(response)["code"] == "no_worker"
    assert (await router.http.get("/health")).status_code == 200


async def test_a_defect_is_a_500_that_tells_nothing_of_the_inside(router, fake) -> None:
    fake.open = lambda request: 1 / 0
    response = await router.http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    assert "division" not in response.text
    assert response.headers["x-request-id"]
    assert error_of(response)["type"] == "server_error"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_goes_away_cancels_every_choice_at_once(router, fake, path, stream) -> None:
    fake.pace_s = 0.01
    body = (CHAT if "chat" in path else COMPLETION) | {"n": 2, "max_tokens": 200, "stream": stream}
    asking = asyncio.create_task(router.http.post(path, json=body))
    await fake.opened.wait()
    await asyncio.sleep(0.05)
    asking.cancel()
    await fake.idle()
    assert fake.cancelled == ["client_gone", "client_gone"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_in_the_queue_cancels_too(router, fake, stream) -> None:
    fake.first_token.clear()
    asking = asyncio.create_task(router.http.post("/v1/completions", json=COMPLETION | {"stream": stream}))
    await fake.opened.wait()
    asking.cancel()
    await fake.idle()
    assert fake.cancelled == ["client_gone"]


async def test_one_failing_choice_fails_the_call_and_frees_the_others(router, fake) -> None:
    fake.pace_s = 0.005
    fake.fail_after = (3, NoWorker("gone"))
    response = await router.http.post("/v1/completions", json=COMPLETION | {"n": 3})
    assert response.status_code == 503
    await fake.idle()


async def test_a_second_prompt_that_is_refused_frees_the_first(router, fake) -> None:
    fake.pace_s = 0.01
    opened = fake.open

    def open_once(request):
        if fake.requests:
            raise Overloaded("full")
        return opened(request)

    fake.open = open_once
    response = await router.http.post("/v1/completions", json=COMPLETION | {"prompt": ["a", "b"]})
    assert response.status_code == 429
    assert fake.cancelled == ["failed"]


async def test_text_and_ids_go_there_and_back(router) -> None:
    asked = {"model": "tiny", "prompt": "Zwölf 🦊", "return_token_strs": True}
    tokens = (await router.http.post("/tokenize", json=asked)).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["tokens"][0] == 0
    assert tokens["max_model_len"] == 256
    back = await router.http.post("/detokenize", json={"tokens": tokens["tokens"][1:]})
    assert back.json() == {"prompt": "Zwölf 🦊"}


async def test_a_conversation_can_be_tokenized_and_foreign_ids_can_not_be_read(router) -> None:
    tokens = (await router.http.post("/tokenize", json={"messages": CHAT["messages"]})).json()["tokens"]
    assert tokens[0] == 0
    bad = await router.http.post("/detokenize", json={"tokens": [99999]})
    assert (bad.status_code, error_of(bad)["param"]) == (400, "tokens")
    neither = await router.http.post("/tokenize", json={})
    assert (neither.status_code, error_of(neither)["param"]) == (400, "prompt")


async def test_health_ready_version_and_metrics_answer(router) -> None:
    assert (await router.http.get("/ready")).json() == {"status": "ready", "models": ["tiny"]}
    assert (await router.http.get("/version")).json()["version"]
    assert (await router.http.get("/metrics")).headers["content-type"].startswith("text/plain")


async def test_the_openapi_document_describes_the_bodies(router) -> None:
    assert (await router.http.get("/docs")).status_code == 200
    document = (await router.http.get("/openapi.json")).json()
    content = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "messages" in document["components"]["schemas"][name]["properties"]


def test_the_router_loads_without_torch() -> None:
    code = "import sys, baton.router.server; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_model_without_a_tokenizer_takes_and_gives_bytes(fake, start_router) -> None:
    fake.say = lambda request, choice: [104, 105, 300]
    async with start_router(fake, {}) as clients:
        answer = await clients.openai.chat.completions.create(max_tokens=3, **CHAT)
    assert answer.choices[0].message.content == "hi<300>"
    assert bytes(fake.requests[0].token_ids) == b"user: Hello\nassistant:"


@pytest.mark.parametrize(("setting", "key"), [("port", "router.port"), ("grpc_port", "router.grpc_port")])
async def test_a_port_in_use_is_named_with_the_remedy(router, fake, setting: str, key: str) -> None:
    config = RouterConfig(**({"port": 0, "grpc_port": 0} | {setting: getattr(router.address, setting)}))
    with pytest.raises(ConfigError, match="choose another with") as taken:
        async with running_router(
            config, surfaces_of(config, generation_of(config, fake, ModelCatalog(fake.models)))
        ):
            pass
    assert taken.value.param == key


async def test_leaving_the_server_ends_what_still_runs(fake, start_router) -> None:
    fake.pace_s = 0.02
    async with start_router(fake, {}) as clients:
        asking = asyncio.create_task(clients.http.post("/v1/completions", json=COMPLETION | {"max_tokens": 200}))
        await fake.opened.wait()
    await fake.idle()
    await asyncio.gather(asking, return_exceptions=True)
