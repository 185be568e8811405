"""Adapters on a real cluster: loaded over the API, mixed, replaced and unloaded while workers are killed.

Each answer is compared with the one that the same content gave alone.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from baton.console.main import app
from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.e2e.migration import StreamedAnswer, ask
from tests.engine.adapters.adapter_files import EVERYWHERE, write

PROMPT = [7 + at % 90 for at in range(70)]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RANKS = {"sql": 4, "style": 16, "sql2": 8, "wide": 128}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = Path(tmp_path_factory.mktemp("adapters"))
    for seed, (name, rank) in enumerate(RANKS.items(), 1):
        write(found / name, Path(DRAFT), rank=rank, seed=seed, size=0.05)
    (found / "linked").symlink_to(found / "sql")
    broken = write(found / "broken", Path(DRAFT), seed=9)
    (broken / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle")
    other = write(found / "other", Path(DRAFT), seed=9, change=lambda tensors: tensors.update(narrow(tensors)))
    assert other.is_dir()
    write(found / "words", Path(DRAFT), (*EVERYWHERE, "embed_tokens"), seed=9, change=fewer_words)
    write(found / "half", Path(DRAFT), seed=9, change=half)
    write(found / "stranger", Path(DRAFT), seed=9, change=stranger)
    return found


def held(fleet: Fleet) -> set[str]:
    """Returns the adapters that workers report."""
    return {adapter for entry in fleet.roster().values() for adapter in entry.info.adapters}


def narrow(tensors: dict[str, Any]) -> dict[str, Any]:
    """The first tensors of another base: a hidden size of 64."""
    return {name: tensor[:, :64].contiguous() for name, tensor in tensors.items() if "lora_A" in name}


def fewer_words(tensors: dict[str, Any]) -> None:
    """Another vocabulary: an embedding of one token less."""
    (name,) = (name for name in tensors if "lora_embedding_A" in name)
    tensors[name] = tensors[name][:, 1:].contiguous()


def half(tensors: dict[str, Any]) -> None:
    """A matrix without its partner."""
    del tensors[next(iter(tensors))]


def stranger(tensors: dict[str, Any]) -> None:
    """A module that the model hasn't."""
    name = next(iter(tensors))
    tensors[name.replace("layers.0", "layers.900")] = tensors.pop(name)


@pytest.fixture(scope="module")
def fleet(root: Path):
    router = {"local_prefill_max_tokens": 16, "stall_s": 2.0}
    with Fleet(1, 2, worker={"model": DRAFT, "threads": 1}, router=router, adapters={"root": str(root)}) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_served(fleet: Fleet):
    yield
    for entry in httpx.get(fleet.url + "/v1/adapters", timeout=60).json()["data"]:
        post(fleet, UNLOAD, lora_name=entry["id"])


def post(fleet: Fleet, path: str, **body: Any) -> httpx.Response:
    return httpx.post(fleet.url + path, json=body, timeout=120)


def load(fleet: Fleet, name: str, path: str = "", **more: Any) -> str:
    done = post(fleet, LOAD, lora_name=name, lora_path=path or name, **more)
    assert done.status_code == 200, done.text
    return done.json()["adapter_id"]


def body(model: str, tokens: int = 24, **more: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return asked | {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}} | more


def ids(heard: StreamedAnswer) -> list[int]:
    assert heard.error is None, heard.error
    return heard.choices[0]["ids"]


def command(*arguments: str) -> tuple[int, str]:
    """Runs `baton adapters`; returns its exit status and what it says."""
    result = CliRunner().invoke(app, ["adapters", *arguments], env=dict(os.environ))
    return result.exit_code, " ".join(result.output.split())


async def alone(fleet: Fleet, *models: str, tokens: int = 24) -> list[list[int]]:
    return [ids(await ask(fleet, body(model, tokens))) for model in models]


async def test_base_and_adapters_together_answer_as_alone_also_when_a_worker_is_killed(fleet: Fleet) -> None:
    load(fleet, "sql")
    load(fleet, "style")
    models = ("demo-draft", "sql", "style")
    wanted = await alone(fleet, *models)
    assert len({tuple(answer) for answer in wanted}) == 3
    together = await asyncio.gather(*(ask(fleet, body(model)) for model in models * 2))
    assert [ids(heard) for heard in together] == wanted * 2

    killed: list[tuple[str, str]] = []

    def kill(slot: str) -> None:
        if not killed:
            killed.append((slot, fleet.record(slot).incarnation))
            fleet.kill(slot, "engine")

    broken = await asyncio.gather(*(ask(fleet, body(model), 3, kill) for model in models * 2))
    assert [ids(heard) for heard in broken] == wanted * 2
    await asyncio.to_thread(fleet.wait_for_return, *killed[0])
    assert await alone(fleet, *models) == wanted
    fleet.wait_for_baseline()


async def test_a_replaced_name_gives_its_new_content_to_new_requests_alone(fleet: Fleet) -> None:
    old = load(fleet, "sql")
    load(fleet, "new", "sql2")
    [before], [after] = await alone(fleet, "sql", tokens=60), await alone(fleet, "new", tokens=60)
    replaced: list[str] = []

    def replace(slot: str) -> None:
        replaced.append(load(fleet, "sql", "sql2", load_inplace=True))

    running = await ask(fleet, body("sql", 60), 2, replace)
    assert ids(running) == before
    assert replaced[0] != old
    assert await alone(fleet, "sql", tokens=60) == [after]
    await asyncio.to_thread(wait_for, lambda: old not in held(fleet), what="the old content being gone")


async def test_an_unloaded_adapter_is_unknown_and_its_requests_end_on_it(fleet: Fleet) -> None:
    load(fleet, "sql")
    [wanted] = await alone(fleet, "sql", tokens=60)
    unloaded: list[int] = []
    heard = await ask(
        fleet, body("sql", 60), 2, lambda slot: unloaded.append(post(fleet, UNLOAD, lora_name="sql").status_code)
    )
    assert (ids(heard), unloaded) == (wanted, [200])
    client = openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="sql", prompt="x")
    assert "sql" not in [m.id for m in (await client.models.list()).data]
    await client.close()
    fleet.wait_for_baseline()


def test_what_cannot_be_served_is_refused_by_name_and_leaves_nothing(fleet: Fleet, root: Path) -> None:
    bad = {
        "../sql": "relative to adapters.root",
        str(root / "sql"): "relative to adapters.root",
        "linked": "linked",
        "broken": "adapter_model.safetensors",
        "other": "shape",
        "wide": "rank",
        "words": "embed_tokens",
        "half": "without a lora_",
        "stranger": "isn't a layer of this model",
        "nowhere": "nowhere",
    }
    for path, named in bad.items():
        code, said = command("add", "x", path, "--url", fleet.url)
        assert (code, named in said or path in said) == (1, True), said
        refused = post(fleet, LOAD, lora_name="x", lora_path=path)
        told = refused.json()["error"]
        assert (refused.status_code, told["code"]) == (400, "adapter_refused"), refused.text
        assert named in told["message"] or named == told["param"], told
    taken = post(fleet, LOAD, lora_name="demo-draft", lora_path="sql")
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "adapter_taken")
    assert httpx.get(fleet.url + "/v1/adapters", timeout=60).json()["data"] == []
    wait_for(lambda: not held(fleet), what="workers holding nothing")


async def test_adapters_outlive_the_router(fleet: Fleet) -> None:
    load(fleet, "sql", pinned=True)
    [wanted] = await alone(fleet, "sql")
    assert fleet.router is not None
    fleet.router.kill()
    fleet.router.wait()
    fleet.start_router()
    wait_for(fleet.answers, what="the router being back")
    assert await alone(fleet, "sql") == [wanted]


async def test_every_surface_is_on_the_adapter(fleet: Fleet) -> None:
    load(fleet, "sql")
    client = openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0)

    async def told(model: str) -> list[Any]:
        said = [{"role": "user", "content": "What is a river?"}]
        chat = await client.chat.completions.create(model=model, messages=said, max_tokens=8, temperature=0)
        many = await client.completions.create(
            model=model,
            prompt="A river",
            max_tokens=6,
            n=2,
            seed=3,
            logprobs=1,
            extra_body={"guided_regex": "[a-z ]+"},
        )
        embedded = await client.embeddings.create(model=model, input="A river")
        return [chat.choices[0].message.content, [c.logprobs for c in many.choices], embedded.data[0].embedding]

    base, sql = await told("demo-draft"), await told("sql")
    assert all(a != b for a, b in zip(base, sql, strict=True))
    await client.close()


@pytest.mark.thorough
def test_the_command_adds_lists_and_removes(fleet: Fleet) -> None:
    def baton(*arguments: str) -> str:
        code, said = command(*arguments, "--url", fleet.url)
        assert code == 0, said
        return said

    assert "sql@" in baton("add", "sql", "sql", "--pinned")
    listed = baton("list")
    assert {"sql", "decode-0,", "demo-draft"} <= set(listed.split())
    baton("remove", "sql")
    assert "sql" not in baton("list")
