"""An adapter's name as `model` on every surface that generates, listed beside the models, hidden from others."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import msgspec
import openai
import pytest

from baton.cluster.adapters import AdapterEntry
from baton.cluster.config import RouterConfig
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as pb_grpc
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing, add_key
from baton.router.adapters.registry import AdapterRegistry
from baton.router.api.batch.lines import BatchLine, answer_line
from baton.router.server import running_router
from baton.router.text.catalog import ModelCatalog
from tests.router.conftest import Clients
from tests.router.parts import generation_of, surfaces_of

ONE = "1" * 16
SQL = AdapterEntry("sql", "tiny", "team/sql", ONE, at=7.0)
STYLE = AdapterEntry("style", "tiny", "/srv/secret/style", ONE)
MINE = AdapterEntry("mine", "tiny", "mine", ONE, tenant="acme")
UNREAD = AdapterEntry("unread", "tiny", "unread")


@asynccontextmanager
async def router_with(fake, model_dir, gate: AccessGate | None = None, *entries: AdapterEntry) -> AsyncIterator:
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0)
    adapters = AdapterRegistry(entries or (SQL, STYLE, MINE, UNREAD))
    catalog = ModelCatalog(fake.models, {"tiny": model_dir}, time.time, adapters)
    generation = generation_of(config, fake, catalog, gate)
    async with running_router(config, surfaces_of(config, generation)) as address:
        clients = Clients(address)
        yield SimpleNamespace(clients=clients, generation=generation, adapters=adapters)
        await clients.close()


@pytest.fixture
async def router(fake, model_dir):
    async with router_with(fake, model_dir) as running:
        yield running


async def test_every_openai_endpoint_takes_an_adapters_name(router, fake):
    client = router.clients.openai
    said = [{"role": "user", "content": "x"}]
    completion = await client.completions.create(model="sql", prompt="x", max_tokens=2)
    chat = await client.chat.completions.create(model="sql", messages=said, max_tokens=2)
    response = await client.responses.create(model="sql", input="x", max_output_tokens=16)
    embeddings = await client.embeddings.create(model="sql", input="x")
    line = BatchLine("1", "POST", "/v1/completions", {"model": "sql", "prompt": "x", "max_tokens": 2})
    answer, good = await answer_line(router.generation, line, "r")
    assert good
    batched = answer["response"]["body"]["model"]
    assert {completion.model, chat.model, response.model, embeddings.model, batched} == {"sql"}
    seen = {(r.model_id, r.context.adapter_id) for r in fake.requests}
    assert (seen, len(fake.requests)) == ({("tiny", f"sql@{ONE}")}, 5)


async def test_the_base_models_answers_are_on_no_adapter(router, fake):
    for model in ("tiny", ""):
        body = {"model": model, "prompt": "x", "max_tokens": 2}
        assert (await router.clients.http.post("/v1/completions", json=body)).json()["model"] == "tiny"
    assert [r.context.adapter_id for r in fake.requests] == ["", ""]


async def test_grpc_takes_the_name_as_model_or_beside_it(router, fake):
    stub = pb_grpc.InferenceStub(router.clients.channel)
    for asked in (
        pb.GenerateRequest(model="sql", text="x"),
        pb.GenerateRequest(model="tiny", adapter="sql", text="x"),
    ):
        asked.sampling.max_tokens = 2
        assert (await stub.Generate(asked)).model == "sql"
    assert {r.context.adapter_id for r in fake.requests} == {f"sql@{ONE}"}
    cards = (await stub.ListModels(pb.ListModelsRequest())).models
    assert [(c.id, c.parent) for c in cards][:2] == [("tiny", ""), ("mine", "tiny")]
    for wrong in (
        pb.GenerateRequest(model="tiny", adapter="none", text="x"),
        pb.GenerateRequest(model="no", text="x"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(wrong)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as two:
        await stub.Generate(pb.GenerateRequest(model="sql", adapter="style", text="x"))
    assert two.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "name one of them" in str(two.value.details())


async def test_the_open_inference_protocol_takes_the_name(router, fake):
    http = router.clients.http
    done = await http.post("/v2/models/sql/generate", json={"text_input": "x", "parameters": {"max_tokens": 2}})
    assert done.json()["model_name"] == "sql"
    assert fake.requests[0].context.adapter_id == f"sql@{ONE}"
    assert (await http.get("/v2/models/sql/ready")).json() == {"ready": True}
    assert (await http.get("/v2/models/sql")).json()["name"] == "sql"
    index = (await http.post("/v2/repository/index")).json()
    assert {"sql", "tiny"} <= {entry["name"] for entry in index}


async def test_models_are_listed_with_root_and_parent(router):
    models = {m.id: m for m in (await router.clients.openai.models.list()).data}
    shown = {name: (m.root, m.parent) for name, m in models.items()}
    assert shown == {
        "tiny": ("tiny", None),
        "mine": ("mine", "tiny"),
        "sql": ("team/sql", "tiny"),
        "style": ("style", "tiny"),  # not where the server keeps it
        "unread": ("unread", "tiny"),
    }
    assert (await router.clients.openai.models.retrieve("sql")).created == 7


async def test_unknown_names_are_unknown_and_unread_ones_are_not_there_yet(router):
    client = router.clients.openai
    for name in ("nope", f"sql@{ONE}"):
        with pytest.raises(openai.NotFoundError) as refused:
            await client.completions.create(model=name, prompt="x")
        assert refused.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError) as late:
        await client.completions.create(model="unread", prompt="x")
    assert late.value.status_code == 503
    assert "no worker has loaded adapter 'unread' yet" in late.value.message


async def test_a_name_that_may_be_an_adapters_is_no_404_before_the_registry_was_read(router):
    router.adapters.is_complete = False
    with pytest.raises(openai.InternalServerError, match="Redis is away") as late:
        await router.clients.openai.completions.create(model="nope", prompt="x")
    assert late.value.status_code == 503


async def test_tokenizers_are_the_base_models(router):
    for name in ("tiny", "sql"):
        found = await router.clients.http.post("/tokenize", json={"model": name, "prompt": "The fox"})
        assert found.json()["count"] > 1


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.json"
    made = {
        "acme": add_key(path, "acme", 0.0),
        "other": add_key(path, "other", 0.0),
        "limited": add_key(path, "limited", 0.0, adapters=("sql",)),
        "by_model": add_key(path, "by_model", 0.0, models=("sql",)),
        "bound": add_key(path, "bound", 0.0, adapter="style"),
        "ops": add_key(path, "ops", 0.0, admin=True),
    }
    return made, AccessGate(KeyRing(path, lambda: 0.0), lambda: 0.0)


async def test_keys_see_and_use_their_tenants_adapters_alone(fake, model_dir, keys):
    made, gate = keys
    async with router_with(fake, model_dir, gate) as running:

        async def ask(key: str, model: str) -> tuple[int, str]:
            headers = {"authorization": f"Bearer {made[key]}"}
            body = {"model": model, "prompt": "x", "max_tokens": 2}
            done = await running.clients.http.post("/v1/completions", json=body, headers=headers)
            return done.status_code, done.json().get("model", "")

        async def described(key: str, path: str) -> int:
            headers = {"authorization": f"Bearer {made[key]}"}
            return (await running.clients.http.get(path, headers=headers)).status_code

        async def listed(key: str) -> set[str]:
            headers = {"authorization": f"Bearer {made[key]}"}
            found = (await running.clients.http.get("/v1/models", headers=headers)).json()
            return {m["id"] for m in found["data"]}

        assert await ask("acme", "mine") == (200, "mine")
        assert await ask("other", "mine") == (404, "")
        assert await ask("ops", "mine") == (200, "mine")
        assert "mine" in await listed("acme")
        assert "mine" not in await listed("other")
        assert await listed("limited") == {"tiny", "sql"}
        assert await listed("by_model") == {"sql"}
        assert await described("by_model", "/v1/models/sql") == 200
        assert {await described("by_model", f"/{way}/models/tiny") for way in ("v1", "v2")} == {403}
        assert await described("by_model", "/v2/models/tiny/ready") == 403
        assert await listed("bound") == await listed("other")
        assert await ask("limited", "sql") == (200, "sql")
        assert await ask("limited", "style") == (403, "")
        assert await ask("limited", "tiny") == (200, "tiny")
        assert await ask("by_model", "sql") == (200, "sql")
        assert await ask("by_model", "tiny") == (403, "")
        assert await ask("bound", "tiny") == (200, "style")
        assert await ask("bound", "") == (200, "style")
        assert await ask("bound", "sql") == (200, "sql")
        ready = (await running.clients.http.get("/ready")).json()
        assert ready["models"] == ["tiny"]  # nobody is asked for a key there


async def test_a_keys_adapter_answers_for_its_own_model_alone(fake, model_dir, keys):
    made, gate = keys
    fake.served = (*fake.served, msgspec.structs.replace(fake.served[0], model_id="other"))
    async with router_with(fake, model_dir, gate) as running:

        async def ask(model: str) -> tuple[int, str]:
            headers = {"authorization": f"Bearer {made['bound']}"}
            body = {"model": model, "prompt": [5, 6], "max_tokens": 2}
            done = await running.clients.http.post("/v1/completions", json=body, headers=headers)
            return done.status_code, done.json().get("model", "")

        assert await ask("tiny") == (200, "style")
        assert await ask("") == (200, "style")
        assert await ask("other") == (200, "other")
        await running.adapters.put(msgspec.structs.replace(running.adapters.served()["style"], removed=True))
        assert await ask("sql") == (200, "sql")
        assert (await ask("tiny"))[0] == (await ask(""))[0] == 404


async def test_a_request_keeps_the_content_that_it_was_prepared_on(router, fake):
    fake.pace_s = 0.01
    adapters = router.adapters
    client = router.clients.openai
    stream = await client.completions.create(model="sql", prompt="x", max_tokens=5, stream=True)
    await adapters.put(AdapterEntry("sql", "tiny", "team/sql", "2" * 16))
    async for _ in stream:
        pass
    await client.completions.create(model="sql", prompt="x", max_tokens=2)
    assert [r.context.adapter_id for r in fake.requests] == [f"sql@{ONE}", "sql@" + "2" * 16]
