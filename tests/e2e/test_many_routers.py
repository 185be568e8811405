"""Two router processes on one port: any of them explains, counts quotas, and shows the metrics of both."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from baton.router.access.keys import add_key
from tests.e2e.fleet import Fleet, wait_for

FEW = [f"few-{number}" for number in range(6)]  # keys with a rate of two requests


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    keys = Path(tmp_path_factory.mktemp("keys")) / "keys.json"
    found = {"boss": add_key(keys, "boss", 0.0, admin=True)}
    found |= {name: add_key(keys, name, 0.0, requests_per_min=2) for name in FEW}
    router = {"processes": 2, "keys_file": str(keys)}
    with Fleet(0, 1, colocated=True, worker={"device": "paced:zero"}, router=router) as running:
        yield running, found


async def ask(fleet: Fleet, key: str, **fields) -> httpx.Response:
    """Asks on a connection of its own, so that the kernel picks a process."""
    async with httpx.AsyncClient(timeout=60, verify=False, headers={"authorization": f"Bearer {key}"}) as http:
        return await http.post(fleet.url + "/v1/completions", json={"prompt": "hello", "max_tokens": 4} | fields)


async def explained(fleet: Fleet, key: str, request_id: str) -> dict:
    async with httpx.AsyncClient(timeout=60, verify=False, headers={"authorization": f"Bearer {key}"}) as http:
        found = await http.get(f"{fleet.url}/v1/requests/{request_id}/explain")
        return found.json() if found.status_code == 200 else {}


async def over(fleet: Fleet, key: str, request_id: str) -> dict:
    """Waits until the asked process knows that a request is over; returns the request's decision record."""
    while (record := await explained(fleet, key, request_id)).get("state") != "over":
        await asyncio.sleep(0.05)
    return record


async def test_any_process_explains_any_request(fleet):
    running, keys = fleet
    answers = await asyncio.gather(*(ask(running, keys["boss"]) for _ in range(4)))
    ids = [answer.json()["id"] for answer in answers]
    for _ in range(2):
        records = await asyncio.gather(*(over(running, keys["boss"], i) for i in ids))
    while len({record["router"] for record in records}) < 2:  # the kernel may have picked the same for all four
        another = (await ask(running, keys["boss"])).json()["id"]
        records.append(await over(running, keys["boss"], another))


async def test_a_rate_is_one_for_all_processes(fleet):
    """A router counts for itself while Redis is late, which a busy machine's may be once in a while."""
    running, keys = fleet
    for name in FEW:
        answers = await asyncio.gather(*(ask(running, keys[name]) for _ in range(20)))
        counts = Counter(answer.status_code for answer in answers)
        if counts == {200: 2, 429: 18}:
            break
    assert counts == {200: 2, 429: 18}


def total(fleet: Fleet) -> float:
    lines = httpx.get(fleet.url + "/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("baton_requests_total{"))


def settled(fleet: Fleet) -> float:
    """Returns what six looks in a row agree on: a look leaves out a process that is late."""

    def same() -> list[float]:
        totals = {total(fleet) for _ in range(6)}
        return [*totals] if len(totals) == 1 else []

    return wait_for(same, what="one number of requests")[0]


def test_metrics_are_those_of_both_and_a_killed_process_comes_back(fleet):
    running, keys = fleet
    before = settled(running)
    asked = [asyncio.run(ask(running, keys["boss"])).status_code for _ in range(8)]
    assert asked == [200] * 8
    wait_for(lambda: settled(running) == before + 8, what="the eight being counted, whoever is asked")
    children = Path(f"/proc/{running.router.pid}/task/{running.router.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)

    def back() -> bool:
        now = Path(f"/proc/{running.router.pid}/task/{running.router.pid}/children").read_text().split()
        return len(now) == 2 and children[0] not in now

    wait_for(back, what="the second process")
    wait_for(lambda: asyncio.run(ask(running, keys["boss"])).status_code == 200, what="an answer")
