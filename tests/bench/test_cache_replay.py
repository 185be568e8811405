"""The replay bench on an excerpt: the pool is an LRU of chains, and never better than what is possible."""

from pathlib import Path

import pytest

from bench.cache_replay import Request, best_rate, load_trace, lru_rate, pool_rate, rows

EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_conversation_400.jsonl"


@pytest.mark.parametrize("capacity", [150, 1000, 3000])
def test_the_pool_finds_what_an_lru_of_the_same_size_finds(capacity):
    trace = load_trace(EXCERPT)
    ours, lru, best = pool_rate(trace, capacity), lru_rate(trace, capacity), best_rate(trace, capacity)
    assert abs(ours - lru) < 0.02
    assert ours <= best + 1e-9


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


def test_every_capacity_gives_a_row():
    assert [row.reached for row in rows(EXCERPT, [200, 2000])] == [None, True, None, True, None]
