"""Answers to random JSON schemas are valid, every one, and a killed decode worker changes no token of them."""

import asyncio
import json
import random
from collections.abc import Iterator

import httpx
import jsonschema
import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.paced import slow_profile

AT_ONCE = 16


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """Draws a bounded schema, so that every answer to it ends."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * (3 if depth < 3 else 0))
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)}
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "ü", 'q"uote', 3, None, True, "long value"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["x", 7, False, None])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[0-9]{4}-[0-9]{2}$", "^(yes|no)$"])}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "object":
        names = rng.sample(["name", "age", "größe", "a b", "x", "tags", "id"], rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


def body_of(seed: int) -> tuple[dict, dict]:
    rng = random.Random(seed)
    names = ["answer", "why"]
    schema = {
        "type": "object",
        "properties": {name: random_schema(rng, 1) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    prompt = [rng.randrange(256) for _ in range(rng.choice([5, 40, 150]))]
    fields = {"prompt": prompt, "max_tokens": 4000, "temperature": rng.choice([0, 1.0]), "seed": seed}
    return schema, fields | {"response_format": form, "return_token_ids": True}


async def ask(client: httpx.AsyncClient, url: str, seed: int) -> list[int]:
    """Returns the answer's ids; fails unless the answer is complete and valid."""
    schema, body = body_of(seed)
    response = await client.post(url + "/v1/completions", json=body)
    assert response.status_code == 200, (seed, response.text)
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", (seed, choice["text"][-200:])
    jsonschema.validate(json.loads(choice["text"]), schema)
    return choice["token_ids"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    profile = slow_profile(tmp_path_factory.mktemp("paced"), fixed=0.004, prefill=0.0001, kv=1024)
    with Fleet(1, 2, worker={"device": f"paced:{profile}"}, router={"local_prefill_max_tokens": 16}) as running:
        yield running


async def ask_all(url: str, seeds: range) -> list[list[int]]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> list[int]:
        async with places:
            return await ask(client, url, seed)

    async with httpx.AsyncClient(timeout=100) as client:
        return await asyncio.gather(*(one(seed) for seed in seeds))


@pytest.mark.parametrize("count", [8, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
async def test_random_schemas_are_answered_validly_every_one(fleet: Fleet, count: int) -> None:
    await ask_all(fleet.url, range(count))
    fleet.wait_for_baseline()


@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_a_killed_decode_worker_changes_no_structured_answer(fleet: Fleet, kills: int) -> None:
    rng = random.Random(kills)
    unbroken = await ask_all(fleet.url, range(12))
    for _ in range(kills):
        asking = asyncio.create_task(ask_all(fleet.url, range(12)))
        await asyncio.sleep(rng.uniform(0.2, 0.7))
        slot, part = rng.choice(["decode-0", "decode-1"]), rng.choice(["engine", "io"])
        before = fleet.record(slot).incarnation
        await asyncio.to_thread(fleet.kill, slot, part)
        assert await asking == unbroken
        await asyncio.to_thread(fleet.wait_for_return, slot, before)
    fleet.wait_for_baseline()
