"""Tests a conversation: each turn finds the ones before it, answers included, wherever they were written."""

import random

import httpx
import pytest

from bench import multi_turn
from tests.e2e.fleet import Fleet
from tests.e2e.paced import Oracle, slow_profile

TURNS, USER, ANSWER = 30, 48, 40
NEW = USER + 2 * 16  # the last answer token and a partial block have no finished KV
WAYS = [
    pytest.param(0, id="prefill workers fetch the answers", marks=pytest.mark.thorough),
    pytest.param(128, id="short rests stay on the decode worker", marks=pytest.mark.soak),
]


def fetched_blocks(fleet: Fleet) -> float:
    """Returns how many blocks prefill-0 has fetched from others, by its own metric."""
    text = httpx.get(f"http://{fleet.record('prefill-0').metrics_address}/metrics", timeout=30).text
    return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith("baton_kv_fetched_blocks_total{"))


def expected(oracle: Oracle) -> list[list[int]]:
    """Returns the oracle's answers to the same conversation."""
    rng, said, answers = random.Random(7), [], []
    for number in range(TURNS):
        said += [rng.randrange(*multi_turn.IDS) for _ in range(USER)]
        if number % multi_turn.COLD_EVERY == 0:
            rng = _after_cold(rng, len(said))
        answers.append(oracle.answer(said, ANSWER))
        said += answers[-1]
    return answers


def _after_cold(rng: random.Random, length: int) -> random.Random:
    for _ in range(length):
        rng.randrange(*multi_turn.IDS)
    return rng


@pytest.mark.parametrize("local_max_tokens", WAYS)
def test_thirty_turns_compute_only_what_is_new(tmp_path, monkeypatch, local_max_tokens):
    monkeypatch.setattr(multi_turn, "SETTLE_S", 0.18)
    # a token takes so long that two blocks are fetched sooner than computed, on a busy machine as well
    profile = slow_profile(tmp_path, fixed=0.001, prefill=0.002, kv=1024)
    sections = {"router": {"local_prefill_max_tokens": local_max_tokens}, "redis": {"beat_s": 0.03}}
    with Fleet(1, 1, worker={"device": f"paced:{profile}"}, **sections) as fleet:
        pairs = list(multi_turn.conversation(fleet.url, TURNS, USER, ANSWER))
        fetched = fetched_blocks(fleet)
        fleet.wait_for_baseline()
    turns = [turn for turn, _ in pairs]
    assert [turn.answer for turn in turns] == expected(Oracle(profile))
    reused = [t.cached_tokens >= t.prompt_tokens - NEW for t in turns[1:]]
    assert reused.count(True) >= TURNS - 3, turns  # a turn may come before the index has heard of the last one
    assert fetched > TURNS or local_max_tokens
    early, late, cold = (row.value for row in multi_turn.rows(pairs)[:3])
    assert late < 3 * early + 20, "time to first token grew with the conversation"
    assert late < cold / 2
