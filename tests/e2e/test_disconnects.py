"""A client that goes away, in every phase: its pages are free again on every worker."""

import asyncio
import json
import random
import statistics
import time

import httpx
import pytest

from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.paced import Oracle, slow_profile

PROMPT = 1024
STEP_S = 0.01 + 64 * 0.0003
FREE_S = 60.0  # a stream that nobody dropped would go on for 120 s
PHASES = ("queue", "prefill", "transfer", "decode")


class Client:
    """One streamed request that can be dropped."""

    def __init__(self, fleet: Fleet, prompt: list[int], max_tokens: int = 12000):
        self._body = {
            "prompt": prompt,
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._fleet = fleet
        self.tokens = 0
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with (
            httpx.AsyncClient(timeout=60, verify=False) as http,
            http.stream("POST", self._fleet.url + "/v1/completions", json=self._body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    self.tokens += 1

    async def drop(self) -> float:
        """Closes the connection; returns the time at which it was closed."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return time.monotonic()


async def _snapshots(fleet: Fleet):
    return await asyncio.gather(*(asyncio.to_thread(fleet.snapshot, s) for s in ("prefill-0", "decode-0")))


async def _phase(fleet: Fleet, client: Client) -> str:
    prefill, decode = await _snapshots(fleet)
    if client.tokens or decode.running:
        return "decode"
    if prefill.running or prefill.waiting:
        return "prefill"
    return "transfer" if prefill.leased or decode.leased else "queue"


async def _seconds_to_baseline(fleet: Fleet, since: float) -> float:
    while time.monotonic() - since < FREE_S:
        if all(s.at_baseline and not s.running and not s.waiting for s in await _snapshots(fleet)):
            return time.monotonic() - since
        await asyncio.sleep(0.002)
    raise AssertionError(f"pages are still held: {await _snapshots(fleet)}")


async def _drop_at(fleet: Fleet, prompt: list[int], delay_s: float) -> tuple[str, float]:
    client = Client(fleet, prompt)
    await asyncio.sleep(delay_s)
    phase = await _phase(fleet, client)
    return phase, await _seconds_to_baseline(fleet, await client.drop())


async def _drop_in_queue(fleet: Fleet, oracle: Oracle, seed: int) -> float:
    """Others fill the cluster; the one that waits goes away, then the others do."""
    blockers = [Client(fleet, oracle.prompt(seed * 100 + i, PROMPT)) for i in range(24)]
    await asyncio.to_thread(wait_for, lambda: fleet_queue(fleet), what="a request in the queue")
    gone = [await blocker.drop() for blocker in reversed(blockers)]
    return await _seconds_to_baseline(fleet, gone[-1])


def fleet_queue(fleet: Fleet) -> float:
    """Requests in the router's queue, by its own metric."""
    lines = httpx.get(fleet.url + "/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("baton_requests_queued{"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    profile = slow_profile(tmp_path_factory.mktemp("paced"))
    worker = {"device": f"paced:{profile}", "prefill_chunk_tokens": 64}
    with Fleet(worker=worker, router={"local_prefill_max_tokens": 0}) as fleet:
        yield fleet, Oracle(profile)


async def _drops(fleet: Fleet, oracle: Oracle, repetitions: int, seed: int) -> dict[str, list[float]]:
    rng = random.Random(seed)
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    whole = PROMPT * 0.0003 + PROMPT / 64 * 0.01
    for i in range(repetitions):
        if i % 8 == 0:
            times["queue"].append(await _drop_in_queue(fleet, oracle, seed + i))
            continue
        delay = rng.choice([rng.uniform(0, whole), rng.uniform(whole, whole + 0.06), rng.uniform(0.2, 1.0)])
        phase, took = await _drop_at(fleet, oracle.prompt(seed + 31 * i, PROMPT), delay)
        times[phase].append(took)
    await asyncio.to_thread(wait_for, lambda: fleet_queue(fleet) == 0, what="an empty queue")
    fleet.wait_for_baseline()
    prompt = oracle.prompt(5, 100)
    answer = httpx.post(
        fleet.url + "/v1/completions",
        json={
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        },
        timeout=60,
    ).json()
    assert answer["choices"][0]["token_ids"] == oracle.answer(prompt, 8)
    return times


async def test_a_client_that_goes_away_in_any_phase_leaves_no_page_behind(cluster):
    times = await _drops(*cluster, repetitions=10, seed=1)
    assert sum(map(len, times.values())) == 10


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_200_seeded_disconnects_free_everything_within_100_ms_and_the_step_in_flight(cluster):
    times = await _drops(*cluster, repetitions=200, seed=7)
    for phase, took in times.items():
        ordered = sorted(took) or [0.0]
        print(
            f"{phase:9} n={len(took):3}  p50 {statistics.median(ordered) * 1e3:6.1f} ms  "
            f"max {ordered[-1] * 1e3:6.1f} ms",
            flush=True,
        )
    assert all(times.values()), "a phase was never hit"
    late = [t for took in times.values() for t in took if t > 0.1 + STEP_S]
    assert late == []


async def test_a_client_that_goes_away_unstreamed_is_noticed_too(cluster):
    fleet, oracle = cluster
    body = {"prompt": oracle.prompt(1, 200), "max_tokens": 12000, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as http:
        asked = asyncio.create_task(http.post(fleet.url + "/v1/completions", json=body))
        await asyncio.to_thread(wait_for, lambda: fleet.snapshot("decode-0").running, what="an answer begun")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    fleet.wait_for_baseline(FREE_S)
    wait_for(lambda: fleet_queue(fleet) == 0, what="an empty queue")
