"""The controller of a real cluster: it turns workers when one role is short, and leaves them when told to."""

import asyncio
import random
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleet import Fleet, complete
from tests.e2e.paced import slow_profile

QUICK = {"interval_s": 0.5, "window_s": 4.0, "cooldown_s": 1.0, "horizon_s": 10.0, "grace_s": 0.3, "dial_s": 2.0}

EVERY_S = 0.4  # between two prompts, each of which takes one prefill worker 0.7 s


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    profile = slow_profile(Path(tmp_path_factory.mktemp("paced")), fixed=0.02, prefill=0.0008, kv=64)
    with Fleet(1, 3, worker={"device": f"paced:{profile}"}, controller={"mode": "advise"} | QUICK) as found:
        yield found


def ratio(fleet: Fleet) -> dict:
    return httpx.get(fleet.url + "/v1/ratio", timeout=30).json()


def is_rerole(change: dict) -> bool:
    """The entry follows the change itself: both are read to know that it is over."""
    return change["kind"] == "rerole"


def turn(fleet: Fleet, to: str) -> None:
    reply = httpx.post(fleet.url + "/v1/ratio", json={"ratio": to}, timeout=60)
    assert reply.status_code == 200, reply.text


async def load_until(fleet: Fleet, condition, limit_s: float = 250.0) -> dict:
    """Long prompts, short answers: more than one prefill worker can read. What was seen when it came true."""
    rng, asked, begun = random.Random(1), [], time.monotonic()
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        while not condition(seen := await asyncio.to_thread(ratio, fleet)):
            assert time.monotonic() < begun + limit_s, (seen, fleet.log("router"))
            while len(asked) * EVERY_S <= time.monotonic() - begun:  # as many, however late a busy machine looks
                prompt = [rng.randrange(2, 4000) for _ in range(900)]
                asked.append(asyncio.create_task(complete(client, fleet.url, prompt, max_tokens=4)))
            await asyncio.sleep(EVERY_S)
        answers = await asyncio.gather(*asked)
    assert all(len(a) == 4 for a in answers)
    return seen


@pytest.mark.timeout(900)
async def test_it_says_what_it_would_do_then_does_it_then_honours_a_pin_and_simulates_the_dial(fleet):
    def advised(seen: dict) -> bool:
        advice = seen["advice"]
        return bool(advice and (advice["recommended"] or [0])[0] > 1 and seen["timeline"][0]["kind"] == "advise")

    said = await load_until(fleet, advised)
    assert (said["prefill"], said["advice"]["mode"]) == (1, "advise")
    turn(fleet, "auto")
    done = await load_until(fleet, lambda seen: seen["prefill"] > 1 and any(map(is_rerole, seen["timeline"])))
    change = list(filter(is_rerole, done["timeline"]))[-1]  # the first: newer ones come before it
    assert (change["before"], change["by"]) == ([1, 3], "controller")
    assert "full" in change["reason"]
    assert done["advice"]["pressure"] is not None
    turn(fleet, "1:3")
    until = time.monotonic() + 3

    def pinned_and_simulated(seen: dict) -> bool:
        advice = seen["advice"]
        told = advice["mode"] == "pinned" and advice["goodput_by_ratio"] and advice["twin_error"]
        return time.monotonic() > until and bool(told and advice["twin_error"]["samples"])

    held = await load_until(fleet, pinned_and_simulated)
    assert (held["prefill"], held["advice"]["mode"]) == (1, "pinned")
    points = held["advice"]["goodput_by_ratio"]  # simulated from what was served
    assert [(p["prefill"], p["decode"]) for p in points] == [(1, 3), (2, 2), (3, 1)]
    assert held["advice"]["twin_error"]["samples"] > 0
    fleet.wait_for_baseline()
