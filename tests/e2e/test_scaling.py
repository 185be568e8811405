"""A real cluster that grows when no ratio helps and shrinks when idle: the controller asks, a placement does."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from baton.cluster.scale import ScaleRequest
from baton.launch.scaling import watch_scale
from tests.e2e.fleet import Fleet, complete
from tests.e2e.paced import slow_profile
from tests.e2e.test_serve import Serving

QUICK = {
    "mode": "auto", "interval_s": 0.5, "window_s": 4.0, "cooldown_s": 1.0, "horizon_s": 10.0, "grace_s": 0.3,
    "dial_s": 0.0, "most_workers": 4, "scale_confirm": 2, "scale_down_looks": 4, "scale_cooldown_s": 1.0,
    "payback_s": 6.0, "start_s": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory):
    profile = slow_profile(Path(tmp_path_factory.mktemp("paced")), fixed=0.02, prefill=0.0008, kv=64)
    with Fleet(1, 1, worker={"device": f"paced:{profile}"}, controller=QUICK) as found:
        yield found


@contextlib.asynccontextmanager
async def placing(fleet: Fleet) -> AsyncIterator[None]:
    """Follows requests to scale as `baton serve` does, without Ray."""

    async def apply(scale: ScaleRequest) -> None:
        await asyncio.to_thread(fleet.scale, scale.prefill, scale.decode)

    task = asyncio.create_task(watch_scale(fleet.config.redis.url, "baton", apply))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def seen(url: str) -> dict:
    found = httpx.get(url + "/v1/ratio", timeout=60).json()
    return found | {"kinds": [c["kind"] for c in found["timeline"]], "workers": found["prefill"] + found["decode"]}


async def until(url: str, condition, every_s: float, prompts: int = 0, limit_s: float = 120.0) -> dict:
    """Waits until ``condition`` holds and returns what was seen then; meanwhile asks ``prompts`` at a time, all of
    which must be answered.
    """
    rng, asked, deadline = random.Random(1), [], time.monotonic() + limit_s
    async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:
        while not condition(now := await asyncio.to_thread(seen, url)):
            assert time.monotonic() < deadline, now
            for _ in range(prompts):
                prompt = [rng.randrange(2, 4000) for _ in range(900)]
                asked.append(asyncio.create_task(complete(client, url, prompt, max_tokens=4)))
            await asyncio.sleep(every_s)
        answers = await asyncio.gather(*asked)
    assert all(len(a) == 4 for a in answers)
    return now


async def grow_and_shrink(url: str) -> None:
    """Under load it gets workers, idle it loses them, and every answer is whole."""
    grown = await until(url, lambda now: now["workers"] >= 3 and "add" in now["kinds"], 0.4, prompts=1)
    added = next(c for c in grown["timeline"] if c["kind"] == "add")
    assert "every ratio of" in added["reason"]
    assert added["by"] == "controller"
    text = httpx.get(url + "/metrics", timeout=60).text
    assert 'baton_controller_decisions_total{kind="add"}' in text
    age = next(line for line in text.splitlines() if line.startswith("baton_controller_decision_age_seconds{"))
    assert 'mode="auto"' in age
    assert float(age.split()[-1]) < 30
    shrunk = await until(url, lambda now: now["workers"] == 2 and "remove" in now["kinds"], 0.3)
    assert (shrunk["prefill"], shrunk["decode"]) == (1, 1)


@pytest.mark.thorough
async def test_it_grows_under_a_load_that_no_ratio_carries_and_shrinks_when_idle(fleet: Fleet) -> None:
    async with placing(fleet):
        await grow_and_shrink(fleet.url)


@pytest.mark.soak
def test_workers_come_and_go_through_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`baton serve` with a Ray of its own."""
    profile = slow_profile(tmp_path, fixed=0.02, prefill=0.0008, kv=64)
    for key, value in QUICK.items():
        monkeypatch.setenv(f"BATON_CONTROLLER__{key.upper()}", str(value))
    ports = ("--port", "0", "--grpc-port", "0")
    serving = Serving("--device", f"paced:{profile}", "--prefill", "1", "--decode", "1", *ports)
    try:
        serving.until_ready()
        asyncio.run(grow_and_shrink(serving.url))
    finally:
        serving.end(signal.SIGINT)
