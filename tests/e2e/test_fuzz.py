"""Fuzzed REST and gRPC before a whole cluster of real processes: nothing crashes, nothing is a server error.

``BATON_FUZZ`` sets the soak's number of inputs: 10^6 unless told (`make soak`), 10^5 with `make fuzz`.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter, deque
from pathlib import Path

import grpc
import httpx
import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.fuzz import rest, rpc

COUNT = int(os.environ.get("BATON_FUZZ", "1000000"))
AT_ONCE = 24
REST_SHARE = 0.8
ENDLESS = ("/v1/cluster/stream",)
PROFILE = """
about = "No time per step and a short context, so that any answer ends soon"
kv_bytes_per_token = 64
model_kv_bytes_per_token = 64
pages = 4096
vocab_size = 512
max_model_len = 256
prefill_chunk = 256

[step]
fixed = 0.0
prefill_token = 0.0
prefill_pair = 0.0
decode_sequence = 0.0
decode_context_token = 0.0

[transfer]
fixed = 0.0
per_byte = 0.0
"""


class Fuzzer:
    """Seeds 0, 1, 2, …, so that an input can be made again from its number alone."""

    def __init__(self, fleet: Fleet, document: dict, count: int) -> None:
        self._fleet, self._seeds = fleet, iter(range(count))
        self._operations = rest.operations(document, without=ENDLESS)
        self._schemas = document["components"]["schemas"]
        self.seen: Counter[str] = Counter()
        self.bad: list[str] = []
        self._ids: deque[str] = deque(maxlen=20)

    async def run(self) -> None:
        """All of them; stops early once it has found enough to look at."""
        async with grpc.aio.insecure_channel(self._fleet.grpc) as channel:
            await asyncio.gather(*(self._lane(channel) for _ in range(AT_ONCE)))

    async def _lane(self, channel: grpc.aio.Channel) -> None:
        connection = rest.Connection(*self._fleet.url.removeprefix("http://").split(":"))
        for seed in self._seeds:
            if len(self.bad) >= 10:
                break
            rng = random.Random(seed)
            if rng.random() < REST_SHARE:
                await self._rest(seed, rng, connection)
            else:
                await self._rpc(seed, rng, channel)
        connection.close()

    async def _rest(self, seed: int, rng: random.Random, connection: rest.Connection) -> None:
        asked = rest.case(rng, self._operations, self._schemas, self._fleet.model, tuple(self._ids))
        try:
            reply = await connection.ask(asked)
        except TimeoutError:
            self.bad.append(f"{seed}: no answer to {asked.what}: {asked.raw[:600]!r}")
            return connection.close()
        self.seen[f"http {reply.status}"] += 1
        self._ids += (i.decode() for i in re.findall(rb'"id":"((?:file|batch)[-_][^"]+)"', reply.body))
        silent = reply.status == 0 and asked.whole and not asked.leaves
        if reply.status >= 500 or silent or b'"server_error"' in reply.body:
            self.bad.append(f"{seed}: {reply.status} {reply.body[-400:]!r} to {asked.raw[:1500]!r}")
        return None

    async def _rpc(self, seed: int, rng: random.Random, channel: grpc.aio.Channel) -> None:
        asked = rpc.call(rng, self._fleet.model)
        wrong = await rpc.server_error(channel, asked)
        self.seen[f"grpc {'bad' if wrong else 'fine'}"] += 1
        if wrong:
            self.bad.append(f"{seed}: {wrong} to {asked}"[:2000])


def fuzz(folder: Path, count: int) -> Counter[str]:
    """``count`` inputs to a fresh cluster, which must be whole, idle and right afterwards."""
    profile = folder / "fuzz.toml"
    profile.write_text(PROFILE)
    with Fleet(
        prefill=1, decode=1, worker={"device": f"paced:{profile}"}, router={"allowed_hosts": ("x",)}
    ) as fleet:
        assert fleet.router is not None
        good = {"model": fleet.model, "prompt": [1, 2, 3] * 30, "max_tokens": 8, "temperature": 0}
        with httpx.Client(base_url=fleet.url, timeout=30) as client:
            before = client.post("/v1/completions", json=good).json()["choices"]
            fuzzer = Fuzzer(fleet, client.get("/openapi.json").json(), count)
            begun = time.monotonic()
            asyncio.run(fuzzer.run())
            print(f"\n{count} inputs in {time.monotonic() - begun:.0f} s: {dict(sorted(fuzzer.seen.items()))}")
            assert not fuzzer.bad, "\n".join(fuzzer.bad)
            assert fleet.router.poll() is None
            assert client.post("/v1/completions", json=good).json()["choices"] == before
        fleet.wait_for_baseline()
        log = (fleet.folder / "router.log").read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:9000]
        return fuzzer.seen


def test_some_hundred_odd_inputs_are_all_answered_and_none_is_a_server_error(tmp_path: Path) -> None:
    seen = fuzz(tmp_path, 800)
    assert seen["http 200"] > 50
    assert seen["http 400"] > 100
    assert seen["grpc fine"] > 100


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_very_many_odd_inputs_are_all_answered_and_none_is_a_server_error(tmp_path: Path) -> None:
    fuzz(tmp_path, COUNT)
