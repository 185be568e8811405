"""Seeded kills of ranks under load: no answer is wrong, no rank is left over, and each worker comes back."""

import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest

from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.e2e.test_ranks import PREFILL_FIRST, ask, followers, gone, one_rank, prompt

KILLS = int(os.environ.get("BATON_RANK_KILLS", "200"))
SEED = int(os.environ.get("BATON_RANK_KILLS_SEED", "7"))
PROMPTS, COUNT, CLIENTS = 6, 60, 3
WORKER = {"model": DRAFT, "stall_s": 5.0, "prefill_chunk_tokens": 16}
OTHERS = [{"name": f"other-{role}", "role": role, "count": 1} for role in ("prefill", "decode")]


@cache
def expected(seed: int) -> list[int]:
    return one_rank(asked(seed), COUNT)


def asked(seed: int) -> list[int]:
    return prompt(seed, 150 + 40 * seed)


def keep_asking(fleet: Fleet, stop: threading.Event, seed: int) -> tuple[int, int]:
    """Returns how many requests a client made until it was told to stop, and how many of their answers were
    wrong.
    """
    draw, made, wrong = random.Random(seed), 0, 0
    while not stop.is_set():
        which = draw.randrange(PROMPTS)
        made, wrong = made + 1, wrong + (ask(fleet, asked(which), COUNT)[0] != expected(which))
    return made, wrong


def all_gone(pids: list[int]) -> bool:
    return all(map(gone, pids))


@pytest.mark.soak
def test_kills_of_ranks_under_load_lose_no_answer_and_leave_no_rank() -> None:
    for seed in range(PROMPTS):
        expected(seed)
    draw, stop, took, left = random.Random(SEED), threading.Event(), list[float](), list[int]()
    cluster = {"prefill_tp": 2, "decode_tp": 2, "pools": OTHERS}
    with (
        Fleet(1, 1, cluster=cluster, worker=WORKER, router=PREFILL_FIRST) as fleet,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        clients = [threads.submit(keep_asking, fleet, stop, seed) for seed in range(CLIENTS)]
        try:
            for _ in range(KILLS):
                slot = draw.choice(("prefill-0", "decode-0"))
                before, ranks = fleet.record(slot), followers(fleet, slot)
                time.sleep(draw.random())  # any phase of a step
                began = time.monotonic()
                os.kill(draw.choice([*ranks, before.engine_pid]), signal.SIGKILL)
                fleet.wait_for_return(slot, before.incarnation)
                took.append(time.monotonic() - began)
                wait_for(partial(all_gone, [*ranks, before.engine_pid]), what="all ranks' end")
                left += followers(fleet, slot)
        finally:
            stop.set()
        made, wrong = (sum(numbers) for numbers in zip(*(client.result() for client in clients), strict=True))
        fleet.wait_for_baseline()
        last = followers(fleet, "prefill-0") + followers(fleet, "decode-0")
    assert wrong == 0
    wait_for(partial(all_gone, [*left, *last]), what="all ranks' end")
    times = f"{statistics.median(took):.1f} s (median), {max(took):.1f} s (most)"
    print(f"{KILLS} kills of ranks: {made} answers, {wrong} wrong, 0 ranks left over; replaced within {times}")
