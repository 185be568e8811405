"""Adapters on real workers, colocated and as prefill and decode: merged models' answers, whatever was before."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.e2e.fleet import Fleet
from tests.engine.adapters.adapter_files import EVERYWHERE, merge, write

TOKENS, LONG = 12, 300
PROMPT = [5, 6, 7, 8, 9, 10, 11] * 8  # three full blocks and more
Answer = tuple[list[int], list[float]]


async def ask(
    client: httpx.AsyncClient, url: str, model: str, prompt: list[int] = PROMPT, count: int = TOKENS
) -> Any:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    response = await client.post(url + "/v1/completions", json=body | {"return_token_ids": True})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, url: str, model: str, began: asyncio.Event) -> list[int]:
    """The tokens of a long answer; ``began`` is set with the first."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    asked = body | {"stream": True, "return_token_ids": True}
    async with client.stream("POST", url + "/v1/completions", json=asked) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                began.set()
    return tokens


def said(answer: dict[str, Any]) -> Answer:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def close(found: Answer, wanted: Answer) -> bool:
    return found[0] == wanted[0] and max(abs(a - b) for a, b in zip(found[1], wanted[1], strict=True)) <= 1e-4


def oracle(model: Path, prompt: list[int] = PROMPT, count: int = TOKENS) -> Answer:
    """Returns the answer of one engine without adapters, from merged weights."""
    driver = Driver(load_runner(EngineConfig(str(model), threads=1)), pages=40)
    (tokens,) = driver.answer([prompt], Sampling(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1))
    return tokens, [one.chosen.logprob for one in driver.logprobs[0]]


class Library:
    """A base model, an adapter of the configuration and two contents of one that is loaded while serving."""

    def __init__(self, root: Path) -> None:
        self.model = make(root / "base", "qwen2", tokenizer=True)
        self.root = root / "adapters"
        self.style = write(root / "style", self.model, ("q_proj", "v_proj", "down_proj"), rank=4, seed=4, size=0.3)
        self.sql = write(self.root / "team" / "sql", self.model, EVERYWHERE, rank=8, seed=5)
        self.oracles = {"base": oracle(self.model)}
        self.oracles["style"] = oracle(merge(root / "style-merged", self.model, self.style))
        self.long, _ = oracle(merge(root / "sql-merged", self.model, self.sql), count=LONG)
        self.oracles["sql"] = oracle(root / "sql-merged")

    def replace(self, root: Path) -> None:
        write(self.sql, self.model, EVERYWHERE, rank=16, seed=6)
        self.oracles["sql"] = oracle(merge(root / "replaced", self.model, self.sql))


async def load(client: httpx.AsyncClient, url: str, **more: Any) -> None:
    body = {"lora_name": "sql", "lora_path": "team/sql"} | more
    response = await client.post(url + "/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.thorough  # a cluster's: test_adapter_api.py; merged models: tests/engine/adapters/test_equality.py
@pytest.mark.parametrize("colocated", [False, True])
async def test_adapters_answer_as_merged_models_and_a_replaced_one_never_meets_old_kv(
    tmp_path: Path, colocated: bool
) -> None:
    library = Library(tmp_path)
    worker = {"model": str(library.model), "model_name": "base", "adapters": {"style": str(library.style)}}
    sections: dict[str, Any] = {
        "worker": worker | {"dtype": "float32"},
        "adapters": {"root": str(library.root)},
        "router": {"local_prefill_max_tokens": 0},
    }
    with Fleet(1, 1, colocated=colocated, **sections) as fleet:
        async with httpx.AsyncClient(timeout=60) as client:
            await load(client, fleet.url)
            names = ["base", "style", "sql", "style", "base", "sql"]
            found = await asyncio.gather(*(ask(client, fleet.url, name) for name in names))
            assert all(close(said(one), library.oracles[name]) for one, name in zip(found, names, strict=True))
            assert cached(await ask(client, fleet.url, "sql")) > 0
            began = asyncio.Event()
            going = asyncio.create_task(streamed(client, fleet.url, "sql", began))
            await began.wait()
            library.replace(tmp_path)
            await load(client, fleet.url, load_inplace=True)
            replaced = await ask(client, fleet.url, "sql")
            assert cached(replaced) == 0
            assert close(said(replaced), library.oracles["sql"])
            assert await going == library.long
            gone = await client.post(fleet.url + "/v1/unload_lora_adapter", json={"lora_name": "sql"})
            assert gone.status_code == 200, gone.text
            missing = await client.post(fleet.url + "/v1/completions", json={"model": "sql", "prompt": PROMPT})
            assert missing.status_code == 404
            assert close(said(await ask(client, fleet.url, "style")), library.oracles["style"])
        fleet.wait_for_baseline()
