"""kill -9 of either side at each step of the handoff: no wrong token, no page kept by the survivor."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from baton.launch import supervise
from tests.e2e import watched_host
from tests.e2e.fleet import Fleet
from tests.e2e.paced import Oracle, slow_profile

TYPED = {"worker_lost", "no_worker", "draining", "unavailable", "overloaded", "pool_exhausted"}
STREAMS, TOKENS = 4, 24
KILLS = int(os.environ.get("BATON_SOAK_KILLS", "200"))


class Answer(NamedTuple):
    """Holds the verdict on one stream ("right", "typed: …" or "wrong: …") and the time of each token."""

    verdict: str
    times: list[float]


class Kill(NamedTuple):
    """Holds one run: step and victim, the answers, and the seconds until tokens and until the worker were back."""

    step: str
    victim: str
    answers: list[Answer]
    tokens_back_s: float
    worker_back_s: float


class WatchedFleet(Fleet):
    """Its hosts kill on order."""

    command = watched_host.COMMAND


async def ask(http: httpx.AsyncClient, url: str, prompt: list[int], want: list[int]) -> Answer:
    """One stream, held against the oracle."""
    body = {
        "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    got, times = list[int](), list[float]()
    async with http.stream("POST", url + "/v1/completions", json=body) as response:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            return Answer(_typed(error["code"], True), times)
        async for line in response.aiter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            if "error" in chunk:
                return Answer(_typed(chunk["error"]["code"], got == want[: len(got)]), times)
            for choice in chunk["choices"]:
                if choice.get("token_ids"):
                    got += choice["token_ids"]
                    times.append(time.monotonic())
    return Answer("right" if got == want else f"wrong: {got} instead of {want}", times)


def _typed(code: str, right_so_far: bool) -> str:
    return f"typed: {code}" if code in TYPED and right_so_far else f"wrong: {code}, tokens right: {right_so_far}"


async def kill_once(fleet: Fleet, oracle: Oracle, run: int, step: str, victim: str) -> Kill | None:
    """Some streams, one kill; None when the step was never reached that often."""
    rng, slots = random.Random(run), fleet.folder / "slots"
    nth = {"blocks": rng.randrange(1, 4), "tokens": rng.randrange(1, 12)}.get(step, rng.randrange(1, STREAMS))
    seeds = [rng.choice([run * 10 + i, rng.randrange(40)]) for i in range(STREAMS)]  # some were asked before
    prompts = [oracle.prompt(seed, rng.choice([90, 250, 400]), shared=seed % 2) for seed in seeds]
    wanted = [oracle.answer(prompt, TOKENS) for prompt in prompts]
    watched_host.arm(slots, step, victim, nth, rng.random() < 0.5, f"prefill-{rng.randrange(2)}", run)
    async with httpx.AsyncClient(timeout=60) as http:
        answers = await asyncio.gather(*(ask(http, fleet.url, p, w) for p, w in zip(prompts, wanted, strict=True)))
    hit = watched_host.hit(slots)
    if hit is None:
        (slots / "arm").unlink(missing_ok=True)
        assert all(a.verdict == "right" for a in answers), answers
        return None
    back = await asyncio.to_thread(fleet.wait_for_return, hit["slot"], hit["incarnation"])
    fleet.wait_for_baseline()
    gaps = [min((t - hit["at"] for t in a.times if t > hit["at"]), default=0.0) for a in answers]
    return Kill(step, victim, list(answers), max(gaps), back - hit["at"])


@contextmanager
def watched_fleet(folder: Path, transport: str = "auto"):
    """Two and two, with a lower tier each; every death is a first one: no growing pause before a start."""
    profile = slow_profile(folder, fixed=0.004, prefill=0.0001, kv=1024)
    worker = {
        "device": f"paced:{profile}",
        "pages": 160,  # so few that old blocks go down to the tiers and come up again
        "host_tier_bytes": 2 << 20,
        "disk_tier_bytes": 16 << 20,
        "disk_tier_dir": str(folder),
        "kv_transport": transport,
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervise, "HEALTHY_S", 0.0)
        with WatchedFleet(2, 2, worker=worker, router={"local_prefill_max_tokens": 0}) as fleet:
            yield fleet, Oracle(profile)
            print(fleet.hung(), end="", flush=True)  # not an assertion: at load 25 an orderly leave takes as long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with watched_fleet(Path(tmp_path_factory.mktemp("paced"))) as found:
        yield found


EACH_STEP_ONCE = list(
    zip(watched_host.STEPS, itertools.cycle(("decode-io", "prefill-io", "decode-engine")), strict=False)
)


@pytest.mark.thorough  # tests/e2e/test_kills.py, and seeds of the drill
async def test_a_kill_at_each_step_costs_no_wrong_token_and_no_page(cluster):
    fleet, oracle = cluster
    done = [await kill_once(fleet, oracle, run, *how) for run, how in enumerate(EACH_STEP_ONCE)]
    for kill in filter(None, done):
        assert all(not a.verdict.startswith("wrong") for a in kill.answers), kill
    assert sum(kill is not None for kill in done) >= len(done) - 1


async def many_kills(fleet: Fleet, oracle: Oracle, ways: list[tuple[str, str]], count: int) -> None:
    """Makes ``count`` kills, each step and victim in turn, and prints a report."""
    kills: list[Kill] = []
    run = 1000
    while len(kills) < count:
        kill = await kill_once(fleet, oracle, run, *ways[run % len(ways)])
        kills += [kill] if kill is not None else []
        run += 1
        assert run < 1000 + 2 * count + len(ways), "the steps are hardly ever reached"
    _report(kills)
    wrong = [a.verdict for kill in kills for a in kill.answers if a.verdict.startswith("wrong")]
    assert wrong == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_many_seeded_kills_cost_no_wrong_token_and_no_page(cluster):
    fleet, oracle = cluster
    await many_kills(fleet, oracle, list(itertools.product(watched_host.STEPS, watched_host.VICTIMS)), KILLS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["tcp", "shm", "grpc"])
async def test_a_killed_receiver_costs_no_wrong_token_on_any_transport(tmp_path, transport):
    receivers = [victim for victim in watched_host.VICTIMS if victim.startswith("decode")]
    with watched_fleet(tmp_path, transport) as (fleet, oracle):
        print(f"by {transport}:")
        await many_kills(fleet, oracle, list(itertools.product(watched_host.STEPS, receivers)), max(1, KILLS // 4))


def _report(kills: list[Kill]) -> None:
    """Prints by step: runs, streams that ended right, and recovery times."""
    for step in (*watched_host.STEPS, "all"):
        some = [k for k in kills if step in (k.step, "all")]
        verdicts = [a.verdict for k in some for a in k.answers]
        tokens, worker = ([getattr(k, name) for k in some] for name in ("tokens_back_s", "worker_back_s"))
        print(
            f"{step:9} {len(some):3} kills  {verdicts.count('right')}/{len(verdicts)} right  "
            f"next token after p50 {_at(tokens, 50):.2f} s p99 {_at(tokens, 99):.2f} s  "
            f"worker back after p50 {_at(worker, 50):.2f} s p99 {_at(worker, 99):.2f} s",
            flush=True,
        )


def _at(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0
