"""SIGKILL of either process of either role under load: no wrong answer, and the worker comes back."""

import asyncio
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.paced import Oracle, slow_profile

TYPED = {"worker_lost", "no_worker", "draining", "unavailable", "overloaded", "pool_exhausted"}


class Outcome:
    """Counts the fates of requests: "right", "typed:…" or "wrong: …"."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def wrong(self) -> dict[str, int]:
        return {k: v for k, v in self.counts.items() if k.startswith("wrong")}


async def _ask(fleet: Fleet, http: httpx.AsyncClient, oracle: Oracle, seed: int, outcome: Outcome) -> None:
    rng = random.Random(seed)
    prompt = oracle.prompt(seed, rng.choice([20, 150, 500]), shared=seed % 3)
    want = oracle.answer(prompt, 40)
    body = {
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    got: list[int] = []
    try:
        async with http.stream("POST", fleet.url + "/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                outcome.add(f"typed:{error['code']}" if error["code"] in TYPED else f"wrong: {error}")
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        code = chunk["error"]["code"]
                        prefix = got == want[: len(got)]
                        outcome.add(f"typed:{code}" if code in TYPED and prefix else f"wrong: {chunk}")
                        return
                    for choice in chunk["choices"]:
                        got += choice.get("token_ids") or []
    except httpx.HTTPError as error:
        outcome.add(f"wrong: {error!r}")
        return
    outcome.add("right" if got == want else f"wrong: tokens differ at {_first_difference(got, want)}")


def _first_difference(got: list[int], want: list[int]) -> int:
    return next((i for i, (g, w) in enumerate(zip(got, want, strict=False)) if g != w), min(len(got), len(want)))


async def _load(
    fleet: Fleet, oracle: Oracle, outcome: Outcome, stop: asyncio.Event, streams: int, seed: int
) -> None:
    """``streams`` clients, each asking again and again until ``stop``."""

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            turn = 0
            while not stop.is_set():
                await _ask(fleet, http, oracle, seed + number * 1000 + turn, outcome)
                turn += 1

    await asyncio.gather(*(client(i) for i in range(streams)))


async def _kill_under_load(
    fleet: Fleet, oracle: Oracle, slot: str, part: str, seed: int, after_s: float
) -> tuple[Outcome, float]:
    """Outcomes, and seconds until the slot served again; ``after_s``: how long clients have asked before."""
    outcome, stop = Outcome(), asyncio.Event()
    load = asyncio.create_task(_load(fleet, oracle, outcome, stop, 8, seed))
    await asyncio.sleep(after_s)
    await _right_again(outcome, 8)
    before = fleet.record(slot).incarnation
    killed = time.monotonic()
    await asyncio.to_thread(fleet.kill, slot, part)

    recovered = await asyncio.to_thread(fleet.wait_for_return, slot, before) - killed
    await _right_again(outcome, 8)
    stop.set()
    await load
    return outcome, recovered


async def _right_again(outcome: Outcome, more: int) -> None:
    """Until that many answers more were right, or one was wrong."""
    wanted = outcome.counts.get("right", 0) + more
    while outcome.counts.get("right", 0) < wanted and not outcome.wrong:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    profile = slow_profile(Path(tmp_path_factory.mktemp("paced")), fixed=0.004, prefill=0.0001, kv=1024)
    with Fleet(2, 2, worker={"device": f"paced:{profile}"}, router={"local_prefill_max_tokens": 16}) as fleet:
        yield fleet, Oracle(profile)
        print(fleet.hung(), end="", flush=True)  # not an assertion: at load 25 an orderly leave takes as long


@pytest.mark.parametrize(
    ("slot", "part"),
    [
        ("prefill-0", "engine"),
        pytest.param("decode-1", "io", marks=pytest.mark.thorough),
        pytest.param("prefill-0", "io", marks=pytest.mark.thorough),
        pytest.param("decode-1", "engine", marks=pytest.mark.thorough),
    ],
)
async def test_a_killed_process_costs_no_wrong_answer_and_its_worker_comes_back(cluster, slot, part):
    fleet, oracle = cluster
    outcome, _ = await _kill_under_load(fleet, oracle, slot, part, seed=len(slot) * 10 + len(part), after_s=0.6)
    assert outcome.wrong == {}
    fleet.wait_for_baseline()


def _await_redis(fleet, away):
    """Waits until the router's metrics and snapshot, and a worker's metrics, say whether Redis is away."""
    until = time.monotonic() + 60
    worker = f"http://{fleet.record('prefill-0').metrics_address}/metrics"
    while time.monotonic() < until:
        router = f"baton_router_redis_away {float(away)}" in httpx.get(fleet.url + "/metrics", timeout=60).text
        row = re.search(r"^baton_worker_redis_away\{.*\} (\S+)$", httpx.get(worker, timeout=60).text, re.MULTILINE)
        snapshot = httpx.get(fleet.url + "/v1/cluster", timeout=60).json()["redis"]["away_s"]
        if router and float(row[1]) == float(away) and (snapshot is not None) == away:
            return
        time.sleep(0.1)
    raise AssertionError(f"Redis is {'away' if away else 'back'} and the metrics don't say so")


def test_a_worker_that_dies_while_redis_hangs_is_back_when_redis_is(cluster):
    fleet, oracle = cluster
    before, prompt = fleet.record("decode-0").incarnation, oracle.prompt(7, 60)
    os.kill(fleet.redis_pid, signal.SIGSTOP)
    try:
        fleet.kill("decode-0", "io")
        time.sleep(2.5)  # longer than the clients' patience with Redis
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(fleet.url + "/v1/completions", json=body, timeout=60).json()["choices"][0]
        assert answer["token_ids"] == oracle.answer(prompt, 5)  # the other one serves meanwhile
        _await_redis(fleet, away=True)
    finally:
        os.kill(fleet.redis_pid, signal.SIGCONT)
    _await_redis(fleet, away=False)
    fleet.wait_for_return("decode-0", before)
    fleet.wait_for_baseline()


@pytest.mark.thorough
@pytest.mark.parametrize("slot", ["prefill-0", "decode-1"])
async def test_a_stopped_engine_is_replaced_and_its_requests_go_elsewhere(tmp_path, slot):
    profile = slow_profile(tmp_path, fixed=0.004, prefill=0.0001, kv=1024)
    worker, router = (
        {"device": f"paced:{profile}", "stall_s": 3.0},
        {"local_prefill_max_tokens": 16, "stall_s": 1.0},
    )
    with Fleet(2, 2, worker=worker, router=router) as fleet:
        before, outcome, stop = fleet.record(slot), Outcome(), asyncio.Event()
        load = asyncio.create_task(_load(fleet, Oracle(profile), outcome, stop, 6, seed=9))
        await _right_again(outcome, 6)
        os.kill(before.engine_pid, signal.SIGSTOP)

        def stalled() -> bool:
            return fleet.roster()[slot].info.state == "stalled"

        await asyncio.to_thread(wait_for, stalled, what="the news of the stall")
        await asyncio.to_thread(fleet.wait_for_return, slot, before.incarnation)
        stop.set()
        await load
        assert outcome.wrong == {}
        assert not any(what.startswith("typed") for what in outcome.counts), outcome.counts
        fleet.wait_for_baseline()


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_40_seeded_kills_cost_no_wrong_answer(cluster):
    fleet, oracle = cluster
    rng, total, times = random.Random(40), Outcome(), []
    for seed in range(40):
        slot, part = rng.choice(fleet.slots), rng.choice(["engine", "io"])
        outcome, took = await _kill_under_load(fleet, oracle, slot, part, seed * 17, rng.uniform(0.2, 1.0))
        times.append(took)
        for what, count in outcome.counts.items():
            total.counts[what] = total.counts.get(what, 0) + count
        fleet.wait_for_baseline()
    times.sort()
    print(f"outcomes {total.counts}; back after p50 {times[20]:.2f} s, max {times[-1]:.2f} s", flush=True)
    assert total.wrong == {}
