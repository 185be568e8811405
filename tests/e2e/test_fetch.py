"""A prefill worker takes blocks from whoever holds them, and computes when that one is of no use."""

import os
import signal
import time

import httpx
import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.paced import Oracle, slow_profile

PROMPT, BLOCKS = 800, 50
SETTLE_S = 0.4  # a report and a beat, so that the index knows


def ask(fleet: Fleet, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were found."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(fleet.url + "/v1/completions", json=body, timeout=60).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def fetched(fleet: Fleet) -> list[float]:
    """Blocks each prefill worker took from others."""
    found = []
    for slot in ("prefill-0", "prefill-1"):
        text = httpx.get(f"http://{fleet.record(slot).metrics_address}/metrics", timeout=5).text
        lines = (x for x in text.splitlines() if x.startswith("baton_kv_fetched_blocks_total{"))
        found.append(sum(float(x.split()[-1]) for x in lines))
    return found


@pytest.fixture
def fleet(tmp_path):
    profile = slow_profile(tmp_path, fixed=0.002, prefill=0.0005, kv=1024)
    sections = {
        "router": {"local_prefill_max_tokens": 0, "policy": "round_robin"},
        "redis": {"beat_s": 0.05},
        "worker": {"device": f"paced:{profile}"},
    }
    with Fleet(2, 1, **sections) as up:
        up.oracle = Oracle(profile)
        yield up


def test_the_next_prefill_worker_fetches_what_another_worker_holds(fleet):
    head = fleet.oracle.prompt(1, PROMPT)
    assert ask(fleet, head) == (fleet.oracle.answer(head, 4), 0)
    time.sleep(SETTLE_S)
    for turn in range(2):  # round robin: both prefill workers have their turn
        prompt = [*head, *fleet.oracle.prompt(2 + turn, 40)]
        assert ask(fleet, prompt) == (fleet.oracle.answer(prompt, 4), PROMPT)
    assert sorted(fetched(fleet)) == [0, BLOCKS]
    fleet.wait_for_baseline()


def test_a_holder_that_hangs_costs_no_more_than_computing_once_more(fleet):
    head = fleet.oracle.prompt(1, PROMPT)
    assert ask(fleet, head)[1] == 0
    time.sleep(SETTLE_S)
    holders = [fleet.record(slot).pid for slot in ("prefill-0", "prefill-1", "decode-0")]
    computed_s = PROMPT * 0.0005 + PROMPT / 64 * 0.002
    prompt = [*head, *fleet.oracle.prompt(2, 40)]
    reader = _idle_reader(fleet)
    for pid in {fleet.record(slot).pid for slot in ("prefill-0", "prefill-1")} - {reader}:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        answer, _ = ask(fleet, prompt)
        took = time.monotonic() - began
    finally:
        for pid in holders:
            os.kill(pid, signal.SIGCONT)
    assert answer == fleet.oracle.answer(prompt, 4)
    assert took < 2 * computed_s + 8, "the fetch was not given up"
    fleet.wait_for_baseline()


def _idle_reader(fleet: Fleet) -> int:
    """The I/O process of the prefill worker that has computed nothing yet."""
    idle = [s for s in ("prefill-0", "prefill-1") if fleet.snapshot(s).steps == 0]
    assert len(idle) == 1
    return fleet.record(idle[0]).pid
