"""/v1/load_lora_adapter and its kin over HTTP, before workers that speak gRPC: an operator's act, typed errors."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import openai
import pytest

from baton.cluster.config import RouterConfig, load_config
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing, add_key
from baton.router.adapters.registry import AdapterRegistry
from baton.router.api.surfaces import AdapterSurface
from baton.router.server import running_router
from baton.router.text.catalog import ModelCatalog
from baton.router_host.compose import configured_adapters, loading_off
from tests.router.conftest import Clients
from tests.router.fake_services import answer_of
from tests.router.fake_workers import cluster
from tests.router.parts import generation_of, surfaces_of

ONE, TWO = "1" * 16, "2" * 16
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "sql", "lora_path": "team/sql"}


@asynccontextmanager
async def router(gate: AccessGate | None = None, off: str = "", decode: int = 2):
    config, adapters = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0), AdapterRegistry()

    def files(c) -> None:
        for worker in (*c.p, *c.d):
            worker.files = {"team/sql": ONE, "style": TWO}

    async with cluster(1, decode, adapters=adapters, prepare=files) as c:
        catalog = ModelCatalog(c.dispatcher.models, {}, time.time, adapters)
        generation = generation_of(config, c.dispatcher, catalog, gate, c.core.decisions)
        surface = AdapterSurface(c.core.adapters, config.max_body_bytes, off)
        surfaces = msgspec.structs.replace(surfaces_of(config, generation), adapters=surface)
        async with running_router(config, surfaces) as address:
            clients = Clients(address)
            yield SimpleNamespace(cluster=c, http=clients.http, openai=clients.openai)
            await clients.close()


async def test_an_adapter_is_loaded_used_listed_and_unloaded():
    async with router() as r:
        done = await r.http.post(LOAD, json=BODY)
        assert done.status_code == 200
        assert done.json()["message"] == "Success: LoRA adapter 'sql' added successfully."
        assert done.json()["adapter_id"] == f"sql@{ONE}"
        assert done.json()["workers"] == ["d0", "d1", "p0"]
        ids = [7] * 40
        answer = await r.openai.completions.create(
            model="sql", prompt=ids, max_tokens=4, temperature=0, extra_body={"return_token_ids": True}
        )
        assert answer.model == "sql"
        assert answer.choices[0].token_ids == answer_of(ids, 4, adapter=f"sql@{ONE}")
        models = {m.id: m for m in (await r.openai.models.list()).data}
        assert (models["sql"].parent, models["sql"].root) == ("m", "team/sql")
        told = (await r.http.get(f"/v1/requests/{answer.id}/explain")).json()
        assert told["adapter"] == f"sql@{ONE}"
        assert "adapter" not in told["choices"][0]["observed_s"]  # it was there
        [listed] = (await r.http.get("/v1/adapters")).json()["data"]
        assert (listed["id"], listed["by"], listed["workers"]) == ("sql", "operator", ["d0", "d1", "p0"])
        for worker in (*r.cluster.p, *r.cluster.d):
            worker.adapters.clear()  # as if it had been evicted, unannounced
        late = await r.openai.completions.create(model="sql", prompt=ids, max_tokens=4)
        told = (await r.http.get(f"/v1/requests/{late.id}/explain")).json()
        assert told["choices"][0]["observed_s"]["adapter"] >= 0
        gone = await r.http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 1})
        assert gone.json()["message"] == "Success: LoRA adapter 'sql' removed successfully."
        with pytest.raises(openai.NotFoundError):
            await r.openai.completions.create(model="sql", prompt=ids)


BAD = [
    ({"lora_path": "x"}, 400, "lora_name"),
    ({"lora_name": "x"}, 400, "lora_path"),
    (BODY | {"lora_name": "a/b"}, 400, "lora_name"),
    (BODY | {"lora_name": "m"}, 409, "lora_name"),
    (BODY | {"lora_name": "style"}, 409, "lora_name"),
    (BODY | {"lora_path": "/etc/passwd"}, 400, "lora_path"),
    (BODY | {"lora_path": "team/../../etc"}, 400, "lora_path"),
    (BODY | {"lora_path": "nowhere"}, 400, "lora_path"),
    (BODY | {"base_model_name": "other"}, 404, "model"),
    (BODY | {"is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
    (BODY | {"tennant": "acme"}, 400, "tennant"),
]


async def test_bad_bodies_are_refused_by_field_and_change_nothing():
    async with router(decode=1) as r:
        assert (await r.http.post(LOAD, json={"lora_name": "style", "lora_path": "style"})).status_code == 200
        for body, status, param in BAD:
            refused = await r.http.post(LOAD, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
        refused = await r.http.post(UNLOAD, json={"lora_name": "nope"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "lora_name")
        assert [e["id"] for e in (await r.http.get("/v1/adapters")).json()["data"]] == ["style"]


async def test_a_name_is_replaced_where_the_operator_says_so():
    async with router(decode=1) as r:
        await r.http.post(LOAD, json=BODY)
        again = await r.http.post(LOAD, json=BODY | {"lora_path": "style"})
        assert again.status_code == 409
        assert "load_inplace" in again.json()["error"]["message"]
        replaced = await r.http.post(LOAD, json=BODY | {"lora_path": "style", "load_inplace": True})
        assert replaced.json()["adapter_id"] == f"sql@{TWO}"


async def test_only_admins_load_where_keys_are_asked_for(tmp_path):
    path = tmp_path / "keys.json"
    made = {who: add_key(path, who, 0.0, admin=who == "ops") for who in ("acme", "ops")}
    async with router(AccessGate(KeyRing(path, time.monotonic), time.monotonic), decode=1) as r:
        statuses = []
        for key in ("", made["acme"], made["ops"]):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answers = [
                await r.http.post(LOAD, json=BODY, headers=headers),
                await r.http.get("/v1/adapters", headers=headers),
                await r.http.post(UNLOAD, json={"lora_name": "sql"}, headers=headers),
            ]
            statuses.append([a.status_code for a in answers])
        assert statuses == [[401] * 3, [403] * 3, [200] * 3]


async def test_a_page_of_another_site_loads_nothing():
    async with router(decode=1) as r:
        refused = await r.http.post(LOAD, json=BODY, headers={"sec-fetch-site": "cross-site"})
        assert refused.status_code == 403
        plain = await r.http.post(LOAD, content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 400


async def test_where_loading_is_off_it_says_why():
    async with router(off="adapters.root is not set, so none can be loaded while serving", decode=1) as r:
        refused = await r.http.post(LOAD, json=BODY)
        assert refused.status_code == 403
        assert "adapters.root" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("router_flags", "root", "why"),
    [
        ({}, "", "adapters.root"),
        ({}, "/srv/adapters", ""),
        ({"host": "0.0.0.0", "insecure": True}, "/srv/adapters", "asks nobody for a key"),
        ({"host": "0.0.0.0", "keys_file": "keys.json"}, "/srv/adapters", ""),
    ],
)
def test_loading_is_off_without_a_root_and_over_a_routable_address_without_keys(tmp_path, router_flags, root, why):
    config = load_config(flags={"router": router_flags, "adapters": {"root": root}}, search=tmp_path)
    assert why in loading_off(config)
    assert bool(why) == bool(loading_off(config))


def test_configured_adapters_are_the_models_own(tmp_path):
    flags = {"worker": {"device": "paced:zero", "model_name": "big", "adapters": {"sql": "/srv/sql"}}}
    [entry] = configured_adapters(load_config(flags=flags, search=tmp_path))
    assert (entry.name, entry.model_id, entry.path, entry.by) == ("sql", "big", "/srv/sql", "config")
