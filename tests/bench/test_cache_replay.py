"""The replay bench on an excerpt: the pool finds what an LRU does and more, and never more than is possible."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.agent_trace import lines
from bench.cache_replay import (
    Request,
    best_rate,
    blocks_of,
    clients,
    hinted_rows,
    load_trace,
    lru_rate,
    pool_rate,
    rows,
    told_rate,
)

EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_conversation_400.jsonl"


@pytest.mark.parametrize("capacity", [150, 1000, 3000])
def test_the_pool_finds_no_less_than_an_lru_of_the_same_size(capacity):
    trace = load_trace(EXCERPT)
    ours, lru, best = pool_rate(trace, capacity), lru_rate(trace, capacity), best_rate(trace, capacity)
    assert lru - 0.005 <= ours <= best + 1e-9


def agents(requests):
    rows = [json.loads(line) for line in lines(seed=1, requests=requests)]
    return [Request(row["input_length"], tuple(row["hash_ids"])) for row in rows]


def test_agents_calls_hold_their_conversation_so_far_and_forks_share_it():
    trace = agents(300)
    assert trace == agents(300)
    assert all(-(-request.tokens // 512) == len(request.blocks) for request in trace)
    parents = Counter(after for request in trace for after in {request.blocks[:-1]} if len(after) > 12)
    assert parents.most_common(1)[0][1] > 1


@pytest.mark.thorough
def test_the_pool_finds_more_of_agents_conversations_than_an_lru_under_pressure():
    trace = agents(1500)
    capacity = blocks_of(trace) // 16
    assert pool_rate(trace, capacity) > lru_rate(trace, capacity) + 0.02


def test_an_endless_cache_finds_every_repeated_prefix():
    trace = load_trace(EXCERPT)
    known, hits = set(), 0
    for request in trace:
        leading = next((i for i, b in enumerate(request.blocks) if b not in known), len(request.blocks))
        hits += min(leading * 512, request.tokens)
        known.update(request.blocks)
    assert pool_rate(trace, len(known)) == hits / sum(r.tokens for r in trace) > 0


def test_a_tail_goes_before_its_head():
    first, other = Request(2048, (1, 2, 3, 4)), Request(1024, (8, 9))
    assert pool_rate([first, other, first], 4) == lru_rate([first, other, first], 4) == 1024 / 5120


def test_every_pressure_gives_its_rows():
    assert [row.reached for row in rows(EXCERPT, [1, 16])] == [None, None, True, True, None, None, None, True]


def test_an_lru_that_is_told_what_comes_back_keeps_it():
    first, once, other = Request(1024, (1, 2)), Request(1024, (3, 4)), Request(512, (1,))
    trace = [first, once, other, first]
    assert lru_rate(trace, 2) == 512 / 3584  # the last one's first block, which was just used
    assert told_rate(trace, 2) == best_rate(trace, 2) == (512 + 1024) / 3584


def test_clients_hint_at_conversations_that_go_on():
    trace = [Request(1000, (1, 2)), Request(1400, (1, 3, 4)), Request(2000, (1, 3, 5, 6))]
    assert clients(trace)["right hints for all that go on"] == [True, True, False]
    assert [row.name for row in hinted_rows(trace, 2)][:3] == [
        "told",
        "no hints",
        "right hints for all that go on",
    ]
