"""A decode worker dies, drains or stops mid-answer: the client gets the unbroken answer, to the token.

Each request is asked for twice: once in peace, once with its worker killed under it. Seeded sampling, several
choices, penalties, logprobs and grammars are all in the draw.
"""

import asyncio
import json
import os
import random
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from baton.protos.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.paced import slow_profile

MAX_TOKENS = 32
ROUTE = re.compile(r"decode=([\w-]+)")


class Heard:
    """One streamed answer: per choice its ids, logprobs and end; the longest silence after the first token."""

    def __init__(self) -> None:
        self.choices: dict[int, dict] = {}
        self.usage: dict = {}
        self.decode = ""
        self.silence = 0.0
        self.tokens = 0
        self._last = 0.0

    def take(self, chunk: dict) -> None:
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            now = time.monotonic()
            self.silence = max(self.silence, now - (self._last or now))
            self._last = now
            kept = self.choices.setdefault(choice["index"], {"ids": [], "text": "", "logprobs": [], "ends": []})
            kept["ids"] += choice.get("token_ids") or []
            kept["text"] += choice.get("text") or ""
            logprobs = choice.get("logprobs") or {}
            tokens, values = logprobs.get("tokens", []), logprobs.get("token_logprobs", [])
            kept["logprobs"] += list(zip(tokens, values, strict=True))
            kept["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            self.tokens += len(choice.get("token_ids") or [])

    @property
    def answer(self) -> dict:
        """All that a client can compare."""
        counted = {k: self.usage.get(k) for k in ("prompt_tokens", "completion_tokens")}
        return {"choices": dict(sorted(self.choices.items())), "usage": counted}


def drawn(rng: random.Random, vocab: int) -> dict:
    """A request's body."""
    body = {
        "prompt": [rng.randrange(2, vocab) for _ in range(rng.choice([20, 130, 300]))],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "n": rng.choice([1, 1, 2, 3]),
        "temperature": rng.choice([0.0, 0.8, 1.2]),
        "seed": rng.randrange(1 << 30),
    }
    if rng.random() < 0.5:
        body |= {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if rng.random() < 0.5:
        body["logprobs"] = rng.randrange(0, 4)
    if rng.random() < 0.3:
        body |= {"guided_regex": "[a-z0-9 ]{150,200}", "ignore_eos": False}
    return body


async def ask(fleet: Fleet, body: dict, after: int = 0, disturb=None) -> Heard:
    """Stream it; once ``after`` tokens are there, ``disturb`` the decode worker that writes it."""
    heard = Heard()
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", fleet.url + "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        heard.decode = ROUTE.search(response.headers["x-baton-route"])[1]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                heard.take(json.loads(line[6:]))
                if disturb and heard.tokens >= after:
                    disturb(heard.decode)
                    disturb = None
    assert disturb is None, "the answer ended before it could be disturbed"
    assert all(len(c["ends"]) == 1 for c in heard.choices.values()), heard.choices
    return heard


async def kill_under(fleet: Fleet, seed: int, vocab: int, workers: int) -> float:
    """One seeded kill mid-stream; the pause that the client saw. Fails unless the answer is the unbroken one."""
    rng = random.Random(seed)
    body, after, part = drawn(rng, vocab), rng.randrange(1, MAX_TOKENS // 2), rng.choice(["engine", "io"])
    unbroken = await ask(fleet, body)
    before = {slot: fleet.record(slot).incarnation for slot in fleet.slots}
    broken = await ask(fleet, body, after, lambda slot: fleet.kill(slot, part))
    assert broken.answer == unbroken.answer, (seed, part, body)

    def back() -> bool:
        record = fleet.record(broken.decode)
        return record.incarnation != before[broken.decode] and record.state == "ready"

    await asyncio.to_thread(wait_for, lambda: back() and fleet.reachable() == workers, 60, f"{broken.decode} back")
    return broken.silence


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    profile = slow_profile(Path(tmp_path_factory.mktemp("paced")), fixed=0.01, prefill=0.0001, kv=1024)
    router = {"local_prefill_max_tokens": 16, "stall_s": 2.0}
    with Fleet(1, 2, worker={"device": f"paced:{profile}"}, router=router) as fleet:
        yield fleet


@contextmanager
def cpu_fleet():
    with Fleet(1, 2, worker={"threads": 1}, router={"local_prefill_max_tokens": 16}) as fleet:
        yield fleet


@pytest.mark.parametrize("seed", range(4))
async def test_a_kill_mid_stream_costs_a_pause_and_not_a_token(paced, seed):
    assert await kill_under(paced, seed, 4096, 3) < 5
    paced.wait_for_baseline()


async def test_draining_a_worker_moves_its_requests_and_none_fails(paced):
    bodies = [drawn(random.Random(100 + i), 4096) | {"max_tokens": 60} for i in range(6)]
    unbroken = [await ask(paced, body) for body in bodies]
    drained: list[str] = []

    def drain(slot: str) -> None:
        if not drained:
            drained.append(slot)
            channel = grpc.insecure_channel(paced.record(slot).address)
            stub = worker_pb2_grpc.WorkerStub(channel)
            replies.append(stub.Drain.future(worker_pb2.DrainRequest(grace_seconds=10), timeout=20))

    replies: list = []
    try:
        broken = await asyncio.gather(*(ask(paced, body, 3, drain) for body in bodies))
        assert [b.answer for b in broken] == [u.answer for u in unbroken]
        reply = await asyncio.to_thread(replies[0].result, 20)
        assert reply.cancelled == 0  # nothing was left to cancel: its requests had gone elsewhere
    finally:
        before = paced.record(drained[0]).incarnation
        paced.kill(drained[0], "io")  # a drained worker stays so until it is started again
        wait_for(lambda: paced.record(drained[0]).incarnation != before and paced.answers(), 30, "a new worker")


@pytest.mark.parametrize("part", ["engine", "io"])
async def test_a_stopped_worker_is_noticed_within_ten_seconds_and_its_requests_move(paced, part):
    body = drawn(random.Random(7), 4096)
    unbroken = await ask(paced, body)
    stopped: list[int] = []

    def stop(slot: str) -> None:
        record = paced.record(slot)
        stopped.append(record.engine_pid if part == "engine" else record.pid)
        os.kill(stopped[0], signal.SIGSTOP)

    try:
        broken = await ask(paced, body, 5, stop)
        assert broken.answer == unbroken.answer
        assert broken.silence < 10
        assert paced.reachable() == 2
    finally:
        os.kill(stopped[0], signal.SIGCONT)
    await asyncio.to_thread(wait_for, lambda: paced.reachable() == 3, 30, "the stopped worker being back")


async def test_a_kill_mid_stream_is_token_identical_on_the_cpu_engine_too():
    with cpu_fleet() as fleet:
        for seed in (11, 12):
            await kill_under(fleet, seed, 500, 3)


async def _many(fleet: Fleet, seeds: range, vocab: int) -> None:
    gaps = [await kill_under(fleet, seed, vocab, 3) for seed in seeds]
    gaps.sort()
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    print(f"{len(gaps)} kills: pause p50 {p50:.2f} s, p99 {p99:.2f} s, max {gaps[-1]:.2f} s", flush=True)
    fleet.wait_for_baseline()


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_140_seeded_kills_on_the_paced_engine(paced):
    await _many(paced, range(1000, 1140), 4096)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_60_seeded_kills_on_the_cpu_engine():
    with cpu_fleet() as fleet:
        await _many(fleet, range(2000, 2060), 500)
