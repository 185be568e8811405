"""Fuzzed REST and gRPC before a whole cluster of real processes: nothing crashes, nothing is a server error.

``BATON_FUZZ`` sets the soak's number of inputs: 10^6 unless told (`make soak`), 10^5 with `make fuzz`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import time
from collections import Counter, deque
from pathlib import Path

import grpc
import httpx
import pytest

from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.fuzz import rest, rpc, slow

COUNT = int(os.environ.get("BATON_FUZZ", "1000000"))
AT_ONCE = 24
CEILING_MIB = 320  # of one process' own memory, whatever is sent to it; it begins with some 100
FLOOD = 300 << 20  # bytes of headers before a key
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
        """Sends all inputs; stops early once it has found enough to look at."""
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
        asked = rest.case(rng, self._operations, self._schemas, self._fleet.name, tuple(self._ids))
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
        asked = rpc.call(rng, self._fleet.name)
        wrong = await rpc.server_error(channel, self._fleet.grpc, asked)
        self.seen[f"grpc {'bad' if wrong else 'fine'}"] += 1
        if wrong:
            self.bad.append(f"{seed}: {wrong} to {asked}"[:2000])


def flooded(fleet: Fleet) -> int:
    """Bytes of one endless head that the router takes before it hangs up."""
    line, sent = b"x-a: " + b"b" * 60_000 + b"\r\n", 0
    with socket.create_connection((fleet.host, fleet.port), timeout=60) as one, contextlib.suppress(OSError):
        one.sendall(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        while sent < FLOOD:
            one.sendall(line)
            sent += len(line)
        require_little_memory(fleet)
    return sent


def require_little_memory(fleet: Fleet) -> None:
    """No process has more than it may."""
    held = slow.resident(fleet)
    assert max(held.values()) < CEILING_MIB, held


def fuzz(folder: Path, count: int, hanging: int = 1, seconds: float = 0.5) -> Counter[str]:
    """``count`` inputs to a fresh cluster, which must be whole, idle, right and small afterwards.

    Meanwhile ``hanging`` clients of each kind hang on each port; ``seconds`` of dripping follow.
    """
    profile = folder / "fuzz.toml"
    profile.write_text(PROFILE)
    with Fleet(
        prefill=1,
        decode=1,
        worker={"device": f"paced:{profile}"},
        router={"allowed_hosts": ("x",), "header_timeout_s": 1.0},
    ) as fleet:
        assert fleet.router is not None
        good = {"model": fleet.name, "prompt": [1, 2, 3] * 30, "max_tokens": 8, "temperature": 0}
        with httpx.Client(base_url=fleet.url, timeout=30) as client:
            before = client.post("/v1/completions", json=good).json()["choices"]
            fuzzer = Fuzzer(fleet, client.get("/openapi.json").json(), count)
            begun = time.monotonic()
            with slow.hanging(fleet, hanging, random.Random(count)) as opened:
                asyncio.run(fuzzer.run())
                slow.drip(opened, seconds)
                assert client.post("/v1/completions", json=good).json()["choices"] == before
                assert flooded(fleet) < FLOOD
                router_own = [one for one in opened if one.fileno() >= 0 and _to(one, fleet.port)]
                wait_for(lambda: slow.cut_off(router_own) == len(router_own), 30, "an end of all who hang on REST")
            require_little_memory(fleet)
            print(f"\n{count} inputs in {time.monotonic() - begun:.0f} s: {dict(sorted(fuzzer.seen.items()))}")
            assert not fuzzer.bad, "\n".join(fuzzer.bad)
            assert fleet.router.poll() is None
            assert client.post("/v1/completions", json=good).json()["choices"] == before
        fleet.wait_for_baseline()
        log = (fleet.files.logs / "router.log").read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:9000]
        return fuzzer.seen


def _to(one: socket.socket, port: int) -> bool:
    try:
        return one.family is socket.AF_INET and one.getpeername()[1] == port
    except OSError:  # it is over already
        return False


def test_some_hundred_odd_inputs_are_all_answered_and_none_is_a_server_error(tmp_path: Path) -> None:
    seen = fuzz(tmp_path, 800)
    assert seen["http 200"] > 50
    assert seen["http 400"] > 100
    assert seen["grpc fine"] > 100


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_very_many_odd_inputs_are_all_answered_and_none_is_a_server_error(tmp_path: Path) -> None:
    fuzz(tmp_path, COUNT, hanging=20, seconds=60)
