"""A prefill worker takes blocks from whoever holds them, and computes when that one is of no use."""

import os
import re
import signal
import time

import httpx
import pytest

from baton.cluster.store.patience import REST_S
from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.paced import Oracle, slow_profile

PROMPT, BLOCKS = 320, 20
PREFILL_S = 0.006  # a token: two seconds for the prompt, in which a fetch may be late on a busy machine
SLOTS = ("prefill-0", "prefill-1")


def ask(fleet: Fleet, prompt: list[int]) -> tuple[int, str]:
    """Returns how many of the prompt's tokens were cached and which prefill worker read it, after comparing the
    answer with the oracle's.
    """
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(fleet.url + "/v1/completions", json=body, timeout=60)
    answer, reader = reply.json(), re.search(r"prefill=(\S+);", reply.headers["x-baton-route"])
    assert answer["choices"][0]["token_ids"] == fleet.oracle.answer(prompt, 4)
    assert reader is not None
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], reader[1]


def fetched(fleet: Fleet) -> dict[str, float]:
    """Blocks each prefill worker took from others."""
    return {slot: fleet.metric(slot, "baton_kv_fetched_blocks_total") for slot in SLOTS}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    profile = slow_profile(tmp_path_factory.mktemp("paced"), fixed=0.002, prefill=PREFILL_S, kv=1024)
    sections = {
        "router": {"local_prefill_max_tokens": 0, "policy": "round_robin"},
        "redis": {"beat_s": 0.05},
        "worker": {"device": f"paced:{profile}"},
    }
    with Fleet(2, 1, **sections) as up:
        up.oracle = Oracle(profile)
        assert {ask(up, up.oracle.prompt(100 + i, 192))[1] for i in range(2)} == set(SLOTS)
        wait_for(lambda: all(knows_its_pace(up, slot) for slot in SLOTS), what="what computing costs being known")
        yield up


def knows_its_pace(fleet: Fleet, slot: str) -> bool:
    """Returns whether routers know how slowly the worker computes; until then they let it fetch."""
    curve = fleet.roster()[slot].load.step_curve
    return curve is not None and curve.prefill_token > PREFILL_S / 2


def held_by_one(fleet: Fleet, seed: int) -> tuple[list[int], str]:
    """A prompt, and the only prefill worker that holds it: the index says so."""
    head = fleet.oracle.prompt(seed, PROMPT)
    cached, holder = ask(fleet, head)
    assert cached == 0
    fleet.wait_for_index(holder, head, PROMPT)
    return head, holder


def test_the_next_prefill_worker_fetches_what_another_worker_holds(fleet):
    """One of three prompts suffices, because a router on a busy machine doesn't wait for the index, and then lets
    it rest.
    """
    for seed in (1, 21, 31):
        head, holder = held_by_one(fleet, seed)
        before = fetched(fleet)
        asked = [ask(fleet, [*head, *fleet.oracle.prompt(seed + turn, 40)]) for turn in (1, 2)]
        took = {slot: count - before[slot] for slot, count in fetched(fleet).items()}
        if sorted(asked) == [(PROMPT, slot) for slot in SLOTS]:  # round robin: both have their turn
            break
        time.sleep(REST_S)
    assert sorted(asked) == [(PROMPT, slot) for slot in SLOTS]
    assert took == {slot: 0 if slot == holder else BLOCKS for slot in SLOTS}
    fleet.wait_for_baseline()


@pytest.mark.thorough  # of one fetch: tests/kv/exchange
def test_a_holder_that_hangs_costs_no_more_than_computing_once_more(fleet):
    head, holder = held_by_one(fleet, 11)
    pid = fleet.record(holder).pid
    os.kill(pid, signal.SIGSTOP)
    try:  # while it hangs: the fetch that it never answers is given up
        assert ask(fleet, [*head, *fleet.oracle.prompt(12, 40)])[1] != holder
    finally:
        os.kill(pid, signal.SIGCONT)
    fleet.wait_for_baseline()
