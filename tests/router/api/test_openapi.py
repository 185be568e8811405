"""Our OpenAPI document is complete: every route with its bodies, its errors and what it answers, streams too."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from baton.cluster.batch_store import BatchStore
from baton.protos.errors import Overloaded
from baton.protos.nouns import Sampling
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing, add_key
from baton.router.observe.decisions import DecisionLog
from baton.router.request.request import RouterRequest


async def test_every_route_is_described_with_its_body_its_answers_and_one_name(router) -> None:
    document = (await router.http.get("/openapi.json")).json()
    names = [op["operationId"] for path in document["paths"].values() for op in path.values()]
    assert len(names) == len(set(names))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert {"200", "400", "500"} <= responses.keys(), (method, path)
            assert not {"422", "default"} & responses.keys(), (method, path)
            assert path in ("/health", "/ready", "/version", "/metrics") or "401" in responses, path
            if method == "post" and path not in ("/v2/repository/index", "/v1/batches/{job_id}/cancel"):
                assert operation["requestBody"]["required"], path
                assert {"413", "429"} <= responses.keys(), path
    prompt = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    assert {"type": "string"} in prompt["anyOf"]


async def test_a_key_is_taken_by_each_scheme_that_is_described(start_router, fake, model_dir, tmp_path) -> None:
    key = add_key(tmp_path / "keys.json", "acme", 0.0)
    gate = AccessGate(KeyRing(tmp_path / "keys.json", lambda: 0.0), lambda: 0.0)
    async with start_router(fake, {"tiny": model_dir}, gate=gate) as router:
        refused = await router.http.get("/v1/models")
        assert refused.status_code == 401
        assert "x-api-key" in refused.json()["error"]["message"]
        open_to = {"authorization": f"Bearer {key}"}
        document = (await router.http.get("/openapi.json", headers=open_to)).json()
        schemes = document["components"]["securitySchemes"]
        asked = document["paths"]["/v1/models"]["get"]["security"]
        assert [name for scheme in asked for name in scheme] == list(schemes) == ["key", "x-api-key"]
        for scheme in schemes.values():
            header = {scheme["name"]: key} if scheme["type"] == "apiKey" else open_to
            assert (await router.http.get("/v1/models", headers=header)).status_code == 200


async def test_every_reference_points_somewhere(router) -> None:
    text = (await router.http.get("/openapi.json")).text
    pointed = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert pointed <= json.loads(text)["components"]["schemas"].keys()


STREAMED = [
    ("/v1/completions", {"prompt": "x", "n": 2, "logprobs": 2, "echo": True}, "CompletionChunk"),
    ("/v1/completions", {"prompt": "x", "return_token_ids": True}, "CompletionChunk"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2}, "ChatCompletionChunk"),
    ("/v1/chat/completions", {"return_token_ids": True}, "ChatCompletionChunk"),
]


@pytest.mark.parametrize(("path", "fields", "name"), STREAMED)
async def test_each_event_of_a_stream_is_as_described(router, path: str, fields: dict, name: str) -> None:
    schemas = (await router.http.get("/openapi.json")).json()["components"]["schemas"]
    said = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "x"}]}
    body = {"max_tokens": 4, "stream": True} | said | fields
    answer = await router.http.post(path, json=body | {"stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    for event in events:
        jsonschema.validate(json.loads(event), schemas[name] | {"components": {"schemas": schemas}})
    whole = await router.http.post(path, json=body | {"stream": False})
    jsonschema.validate(whole.json(), schemas[name.removesuffix("Chunk")] | {"components": {"schemas": schemas}})


TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
CALL = {"role": "user", "content": "x"}
WHOLE = [
    ("get", "/v1/models", None),
    ("get", "/v1/models/{model_id}", None),
    ("post", "/v1/completions", {"prompt": ["x", "yy"], "n": 2, "max_tokens": 2, "prompt_logprobs": 1}),
    ("post", "/v1/chat/completions", {"messages": [CALL], "max_tokens": 2, "n": 2}),
    ("post", "/v1/responses", {"input": "x", "max_output_tokens": 2, "metadata": {"a": "b"}}),
    ("post", "/v1/responses", {"input": "x"}),
    ("post", "/v1/messages", {"messages": [CALL], "max_tokens": 2}),
    ("post", "/v1/messages/count_tokens", {"messages": [CALL]}),
    ("post", "/v1/embeddings", {"input": ["x", "y"]}),
    ("post", "/v1/embeddings", {"input": "x", "encoding_format": "base64"}),
    ("post", "/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("post", "/detokenize", {"tokens": [5]}),
    ("get", "/v1/files", None),
    ("get", "/v1/batches", None),
    ("get", "/health", None),
    ("get", "/ready", None),
    ("get", "/version", None),
    ("get", "/v2", None),
    ("get", "/v2/health/live", None),
    ("get", "/v2/health/ready", None),
    ("post", "/v2/repository/index", {}),
    ("get", "/v2/models/{model}", None),
    ("get", "/v2/models/{model}/ready", None),
    ("post", "/v2/models/{model}/infer", {"id": "7", "inputs": [TENSOR]}),
    ("post", "/v2/models/{model}/generate", {"text_input": "x"}),
]


@pytest.mark.parametrize(("method", "path", "body"), WHOLE)
async def test_each_answer_is_as_described(start_router, fake, model_dir, redis, method, path, body) -> None:
    async with start_router(fake, {"tiny": model_dir}, batches=BatchStore(redis, "t")) as router:
        document = (await router.http.get("/openapi.json")).json()
        at = path.replace("{model_id}", "tiny").replace("{model}", "tiny")
        answer = await router.http.request(method, at, json=body)
        assert answer.status_code == 200, answer.text
        schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema, "nothing is told"
        jsonschema.validate(answer.json(), schema | {"components": document["components"]})


async def test_files_batches_and_records_are_as_described(start_router, fake, model_dir, redis) -> None:
    log = DecisionLog("r", lambda: 0.0)
    async with start_router(fake, {"tiny": model_dir}, batches=BatchStore(redis, "t"), decisions=log) as router:
        document = (await router.http.get("/openapi.json")).json()

        def check(answer, method: str, path: str) -> dict:
            assert answer.status_code == 200, answer.text
            schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(answer.json(), schema | {"components": document["components"]})
            return answer.json()

        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        upload = await router.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("f.jsonl", json.dumps(line).encode())}
        )
        file = check(upload, "post", "/v1/files")["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        job = check(await router.http.post("/v1/batches", json=asked), "post", "/v1/batches")["id"]
        check(await router.http.get(f"/v1/batches/{job}"), "get", "/v1/batches/{job_id}")
        check(await router.http.get("/v1/batches"), "get", "/v1/batches")
        check(await router.http.post(f"/v1/batches/{job}/cancel"), "post", "/v1/batches/{job_id}/cancel")
        check(await router.http.get("/v1/files"), "get", "/v1/files")
        check(await router.http.get(f"/v1/files/{file}"), "get", "/v1/files/{file_id}")
        check(await router.http.delete(f"/v1/files/{file}"), "delete", "/v1/files/{file_id}")
        log.refused(RouterRequest("q", "m", (1,), Sampling()), "short", Overloaded("full"))
        check(await router.http.get("/v1/requests/q/explain"), "get", "/v1/requests/{request_id}/explain")
