"""Adapters loaded, replaced, unloaded, workers killed under load, on real engines: every answer equals its oracle.

$BATON_ADAPTER_RUNS seeds (100), from $BATON_ADAPTER_FIRST (0) on. A request names an adapter; whatever content the
name stood for while the request was there may answer, and nothing else. What can't be answered is a typed error,
and its count is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.conformance.checkpoints import make
from tests.e2e.fleet import Fleet
from tests.e2e.test_adapters import PROMPT, oracle
from tests.engine.adapters.adapter_files import EVERYWHERE, merge, write

RUNS, FIRST = (int(os.environ.get(f"BATON_ADAPTER_{name}", given)) for name, given in (("RUNS", 100), ("FIRST", 0)))
ACTS, ASKED = 5, 3  # changes of a run, and requests beside each
NAMES, CONTENTS = ("sql", "style"), 3
KILLED = 0.3  # of the runs
LOST = {404: {"model_not_found"}, 409: {"adapter_changed"}, 429: {"adapters_full"}, 503: None}  # by status: codes


class Change(NamedTuple):
    """Says what a name stands for from some time between ``began`` and ``ended`` on; None: for nothing."""

    began: float
    ended: float
    content: int | None


class Ledger:
    """Knows what each name may have stood for, and when."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {name: [Change(0.0, 0.0, None)] for name in NAMES}

    def now(self, name: str) -> int | None:
        return self.changes[name][-1].content

    def between(self, name: str, begin: float, end: float) -> set[int | None]:
        """Returns the contents that may answer a request that ran from ``begin`` to ``end``."""
        found, past = set[int | None](), self.changes[name]
        for at, change in enumerate(past):
            over = past[at + 1].ended if at + 1 < len(past) else float("inf")
            if change.began <= end and over >= begin:
                found.add(change.content)
        return found


class Scene:
    """A cluster, its adapters' folders and oracles, and what came of the requests."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient, oracles: list[list[int]]) -> None:
        self.fleet, self.client, self.oracles = fleet, client, oracles
        self.ledger, self.outcomes, self.wrong = Ledger(), Counter[str](), list[str]()
        self.killed: set[int] = set()

    async def change(self, name: str, content: int | None) -> None:
        began, now = time.monotonic(), self.ledger.now(name)
        self.ledger.changes[name].append(Change(began, float("inf"), content))
        if content is None:
            path, body = "unload", {"lora_name": name}
        else:
            path, body = "load", {"lora_name": name, "lora_path": f"c{content}", "load_inplace": now is not None}
        response = await self.client.post(f"{self.fleet.url}/v1/{path}_lora_adapter", json=body)
        self.outcomes[f"{path} {response.status_code}"] += 1
        done = content if response.status_code == 200 else now
        # a change that was refused may have been done all the same: its answer is then either's
        both = [] if response.status_code == 200 else [Change(began, time.monotonic(), content)]
        self.ledger.changes[name][-1:] = [*both, Change(began, time.monotonic(), done)]
        if response.status_code >= 500:  # nobody may know: make it certain
            await self.settle(name)

    async def settle(self, name: str) -> None:
        """Unloads until the router says that the name stands for nothing."""
        began = time.monotonic()
        while True:
            response = await self.client.post(f"{self.fleet.url}/v1/unload_lora_adapter", json={"lora_name": name})
            if response.status_code in (200, 404):
                break
            assert time.monotonic() < began + 120, response.text
            await asyncio.sleep(0.05)
        self.ledger.changes[name].append(Change(began, time.monotonic(), None))

    async def ask(self, name: str) -> None:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        began = time.monotonic()
        response = await self.client.post(
            f"{self.fleet.url}/v1/completions", json=body | {"return_token_ids": True}
        )
        may = self.ledger.between(name, began, time.monotonic())
        if response.status_code == 200:
            tokens = response.json()["choices"][0]["token_ids"]
            right = any(content is not None and tokens == self.oracles[content] for content in may)
            self.outcomes["answered"] += 1
        else:
            code = response.json()["error"]["code"]
            known = LOST.get(response.status_code, set())
            right = (known is None or code in known) and (response.status_code != 404 or None in may)
            self.outcomes[f"{response.status_code} {code}"] += 1
        if not right:
            self.wrong.append(f"{name} of {may}: {response.status_code} {response.text[:300]}")

    def kill(self, slot: str, part: str) -> None:
        """Kills a process of a worker that is there; one that is coming back is left to it."""
        record = self.fleet.record(slot)
        if record.state != "ready":
            return
        try:
            self.killed.add(self.fleet.kill(slot, part))
            self.outcomes["kills"] += 1
        except ProcessLookupError:  # killed a moment ago, and its record doesn't say so yet
            assert self.killed & {record.pid, record.engine_pid}, f"{slot} ended by itself: {record}"

    async def run(self, seed: int) -> None:
        rng = random.Random(seed)
        for act in range(ACTS):
            asking = [asyncio.create_task(self.ask(rng.choice(NAMES))) for _ in range(ASKED)]
            name = rng.choice(NAMES)
            if act == ACTS // 2 and rng.random() < KILLED:
                self.kill(rng.choice(("prefill-0", "decode-0", "decode-1")), rng.choice(("engine", "io")))
            await asyncio.sleep(
                rng.random() * 0.05
            )  # where in the requests' lives the change falls; nothing waits for it
            gone = self.ledger.now(name) is not None and rng.random() < 0.3
            await self.change(name, None if gone else rng.randrange(CONTENTS))
            await asyncio.gather(*asking)


@pytest.mark.soak
async def test_every_answer_is_of_a_content_that_its_name_stood_for(tmp_path: Path) -> None:
    model = make(tmp_path / "base", "qwen2", tokenizer=True)
    folders = [
        write(tmp_path / "adapters" / f"c{at}", model, EVERYWHERE, rank=4 + at, seed=at) for at in range(CONTENTS)
    ]
    oracles = [oracle(merge(tmp_path / f"merged{at}", model, one))[0] for at, one in enumerate(folders)]
    assert len({tuple(tokens) for tokens in oracles}) == CONTENTS
    sections = {
        "worker": {"model": str(model), "model_name": "base", "dtype": "float32"},
        "adapters": {"root": str(tmp_path / "adapters"), "max_loaded": 3},
        "router": {"local_prefill_max_tokens": 0},
    }
    with Fleet(1, 2, **sections) as fleet:
        async with httpx.AsyncClient(timeout=120) as client:
            scene = Scene(fleet, client, oracles)
            for seed in range(FIRST, FIRST + RUNS):
                await scene.run(seed)
                assert scene.wrong == [], f"seed {seed}"
        print(f"{RUNS} runs: {dict(scene.outcomes)}")
        assert scene.outcomes["answered"] > RUNS
