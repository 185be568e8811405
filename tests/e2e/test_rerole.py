"""Workers change their role while they serve: no request fails, no token differs, nothing is loaded again."""

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from baton.cluster.store.patience import REST_S
from tests.e2e.fleet import DRAFT, Fleet, complete, wait_for
from tests.e2e.migration import ROUTE
from tests.e2e.paced import slow_profile

VOCAB = 4096


def prompts(rng: random.Random, count: int, vocab: int, longest: int) -> list[list[int]]:
    """Some share a beginning."""
    stem = [rng.randrange(2, vocab) for _ in range(longest // 2)]
    return [
        (stem if i % 3 == 0 else []) + [rng.randrange(2, vocab) for _ in range(rng.randrange(20, longest // 2))]
        for i in range(count)
    ]


def set_role(fleet: Fleet, slot: str, role: str, **fields) -> httpx.Response:
    return httpx.post(f"{fleet.url}/v1/workers/{slot}/role", json={"role": role} | fields, timeout=60)


async def changed(fleet: Fleet, slot: str, role: str, **fields) -> float:
    """Changes a worker's role; returns the seconds that the router counted."""
    reply = await asyncio.to_thread(set_role, fleet, slot, role, **fields)
    assert reply.status_code == 200, (reply.text, fleet.log(slot))
    return reply.json()["seconds"]


def roles(fleet: Fleet) -> dict[str, str]:
    return httpx.get(fleet.url + "/v1/ratio", timeout=60).json()["workers"]


async def load_during(
    fleet: Fleet, asked: list[list[int]], fields: dict, changes: list[tuple[str, str]]
) -> list[float]:
    """Every prompt again and again while the changes happen, one after another; each answer as it was in peace."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        alone = [await complete(client, fleet.url, p, **fields) for p in asked]
        over = asyncio.Event()

        async def keep_asking(i: int) -> int:
            times = 0
            while not over.is_set():
                assert await complete(client, fleet.url, asked[i], **fields) == alone[i]
                times += 1
            return times

        asking = [asyncio.create_task(keep_asking(i)) for i in range(len(asked))]
        await asyncio.sleep(0.3)
        seconds = []
        for slot, role in changes:
            seconds.append(await changed(fleet, slot, role))
            await asyncio.sleep(0.3)
        over.set()
        assert sum(await asyncio.gather(*asking)) >= len(asked)
    return seconds


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    profile = slow_profile(Path(tmp_path_factory.mktemp("paced")), fixed=0.005, prefill=0.0001, kv=1024)
    with Fleet(2, 2, worker={"device": f"paced:{profile}"}, router={"local_prefill_max_tokens": 16}) as fleet:
        yield fleet


async def test_under_load_every_worker_changes_its_role_and_back_and_no_answer_differs(paced):
    asked = prompts(random.Random(3), 12, VOCAB, 600)
    engines = {slot: paced.record(slot).engine_pid for slot in paced.slots}
    changes = [
        ("decode-1", "prefill"),
        ("prefill-0", "decode"),
        ("decode-0", "prefill"),  # the one that was a prefill worker is the only decode worker now
        ("decode-0", "decode"),
    ]
    await load_during(paced, asked, {"max_tokens": 40, "temperature": 0.8, "seed": 5}, changes)
    for slot in ("decode-1", "prefill-0"):
        await changed(paced, slot, slot.partition("-")[0])
    own = {slot: slot.partition("-")[0] for slot in paced.slots}
    await asyncio.to_thread(wait_for, lambda: roles(paced) == own, what="all in their own roles")
    assert {slot: paced.record(slot).engine_pid for slot in paced.slots} == engines  # nothing was loaded again
    paced.wait_for_baseline()


async def post(client, fleet, prompt: list[int]):
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    return await client.post(fleet.url + "/v1/completions", json=body)


def holder_of(response: httpx.Response) -> str:
    found = ROUTE.search(response.headers["x-baton-route"])
    assert found is not None
    return found[1]


async def all_indexed(fleet, holders: list[str], asked: list[list[int]]) -> None:
    for holder, prompt in zip(holders, asked, strict=True):
        await asyncio.to_thread(fleet.wait_for_index, holder, prompt, len(prompt) // 2)


async def test_cached_blocks_stay_valid_through_a_change(paced):
    """One of three prompts suffices, because a router on a busy machine doesn't wait for the index, and then lets
    it rest.
    """
    asked = prompts(random.Random(4), 3, VOCAB, 800)
    async with httpx.AsyncClient(timeout=120) as client:
        holders = [holder_of(await post(client, paced, prompt)) for prompt in asked]
        await all_indexed(paced, holders, asked)
        await changed(paced, "prefill-0", "decode")
        await changed(paced, "prefill-1", "decode", force=True)
        await all_indexed(paced, holders, asked)
        for prompt in asked:
            usage = (await post(client, paced, prompt)).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if cached >= len(prompt) // 2:
                break
            await asyncio.sleep(REST_S)
        assert cached >= len(prompt) // 2
        for slot in ("prefill-0", "prefill-1"):
            await changed(paced, slot, "prefill")


def test_a_killed_worker_comes_back_in_its_present_role(paced):
    assert set_role(paced, "prefill-1", "decode").status_code == 200
    before = paced.record("prefill-1").incarnation
    paced.kill("prefill-1", "io")
    paced.wait_for_return("prefill-1", before)
    assert paced.record("prefill-1").role == "decode"
    assert roles(paced)["prefill-1"] == "decode", "to the router as well"
    assert set_role(paced, "prefill-1", "prefill").status_code == 200


def test_what_cannot_be_done_is_refused_by_name(paced):
    cases = [
        (set_role(paced, "nobody", "decode"), 404, "decode-0, decode-1, prefill-0, prefill-1"),
        (set_role(paced, "decode-0", "router"), 400, "prefill, decode"),
        (set_role(paced, "decode-0", "prefill", grace_s=-1), 400, "grace_s"),
        (
            httpx.post(paced.url + "/v1/ratio", json={"ratio": "3:2"}, timeout=60),
            400,
            "they can form 1:3, 1:1, 3:1",
        ),
        (httpx.post(paced.url + "/v1/ratio", json={"ratio": "1:0"}, timeout=60), 400, "can't form"),
        (httpx.post(paced.url + "/v1/ratio", json={"ratio": "many"}, timeout=60), 400, "PREFILL:DECODE"),
    ]
    for reply, status, said in cases:
        assert (reply.status_code, said in reply.json()["error"]["message"]) == (status, True), reply.text


@pytest.mark.parametrize(
    ("one", "last", "other"), [("prefill-0", "prefill-1", "decode"), ("decode-1", "decode-0", "prefill")]
)
def test_the_last_worker_of_a_role_changes_by_force_alone_and_comes_back(paced, one, last, other):
    role = last.partition("-")[0]
    assert set_role(paced, one, other).status_code == 200
    refused = set_role(paced, last, other)
    assert (refused.status_code, f"last ready {role} worker" in refused.text) == (400, True), refused.text
    formed = httpx.post(paced.url + "/v1/ratio", json={"ratio": "0:4"}, timeout=60)
    assert role == "decode" or (formed.status_code, "last ready" in formed.text) == (400, True), formed.text
    assert set_role(paced, last, other, force=True).status_code == 200
    wait_for(lambda: list(roles(paced).values()) == [other] * 4, what="all in the other role")
    back = httpx.post(paced.url + "/v1/ratio", json={"ratio": "1:3" if role == "prefill" else "3:1"}, timeout=60)
    assert (back.status_code, sorted(back.json()["workers"].values()).count(role)) == (200, 1), back.text
    for slot in paced.slots:
        assert set_role(paced, slot, slot.partition("-")[0], force=True).status_code == 200


def test_a_ratio_is_formed_pinned_and_given_back(paced):
    formed = httpx.post(paced.url + "/v1/ratio", json={"ratio": "1:3"}, timeout=60).json()
    assert (formed["prefill"], formed["decode"], formed["pin"]["prefill"]) == (1, 3, 1)
    assert formed["timeline"][0]["kind"] == "rerole"
    back = httpx.post(paced.url + "/v1/ratio", json={"ratio": "1:1"}, timeout=60).json()
    assert (back["prefill"], back["decode"]) == (2, 2)
    free = httpx.post(paced.url + "/v1/ratio", json={"ratio": "auto"}, timeout=60).json()
    assert free["pin"] is None


@pytest.mark.thorough
async def test_the_demo_model_changes_without_a_reload_and_without_a_failure():
    with Fleet(1, 2, worker={"model": DRAFT, "threads": 1}, router={"local_prefill_max_tokens": 16}) as fleet:
        asked = prompts(random.Random(9), 4, 500, 300)
        engines = {slot: fleet.record(slot).engine_pid for slot in fleet.slots}
        changes = [("decode-0", "prefill"), ("decode-0", "decode")]
        seconds = await load_during(fleet, asked, {"max_tokens": 24, "temperature": 0}, changes)
        print("seconds from decision to serving:", [round(s, 3) for s in seconds])
        assert {slot: fleet.record(slot).engine_pid for slot in fleet.slots} == engines
        fleet.wait_for_baseline()
