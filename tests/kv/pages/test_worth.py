"""Tests eviction by worth: what a pool keeps once it has seen how blocks are used."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from baton.kv.pages import worth
from baton.kv.pages.pool import PagePool
from baton.protos.nouns import EVERY_BLOCK


def name(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


def run(pool: PagePool, blocks: list[bytes]) -> int:
    """A request of these blocks; how many were found."""
    with pool.open(blocks, len(blocks)) as lease:
        lease.seal_run(lease.held, blocks[lease.held :])
        return lease.held


def conversations(pool: PagePool, name: Callable[[int], Any] = name) -> int:
    """Twelve conversations of 8 blocks take turns with twice as many prompts that nobody repeats; blocks found."""
    draw, fresh, found = random.Random(5), iter(range(10_000, 99_999)), 0
    for _ in range(60):
        for talk in draw.sample(range(12), 12):
            found += run(pool, [name(talk * 100 + i) for i in range(8)])
            for _ in range(2):
                run(pool, [name(next(fresh)) for _ in range(8)])
    return found


def test_blocks_that_come_back_are_kept_and_those_that_never_did_go():
    found = {eviction: conversations(PagePool(160, eviction=eviction)) for eviction in ("worth", "lru")}
    assert found["lru"] < 60 * 12 * 8 * 0.2
    assert found["worth"] > 60 * 12 * 8 * 0.8


@pytest.mark.parametrize("named", [name, int], ids=["hashes", "the simulator's numbers"])
def test_a_large_pool_learns_the_same_from_a_sample(monkeypatch, named):
    monkeypatch.setattr(worth, "REMEMBERED", 200)
    pool = PagePool(160)
    assert conversations(pool, named) > 60 * 12 * 8 * 0.8
    assert len(pool.supply.cached._remembered) <= 201
    pool.check()


def test_a_chain_goes_from_its_tail_also_where_its_head_has_another_history():
    pool = PagePool(12)
    chain = [name(i) for i in range(6)]
    run(pool, chain[:3])
    run(pool, chain[:3])
    run(pool, chain)
    run(pool, [name(50 + i) for i in range(6)])
    for pages in range(1, 13):
        with pool.open([], pages):
            assert pool.match(chain) == sum(block in pool.blocks.page_of for block in chain)


def test_kept_pages_stay_and_are_evicted_once_they_are_let_go():
    pool = PagePool(8)
    blocks = [name(i) for i in range(8)]
    run(pool, blocks)
    page = pool.keep(blocks[7])
    assert page is not None
    with pool.open([], 7):
        assert pool.blocks.block_of[page] == blocks[7]
    pool.unkeep(page)
    pool.open([], 8).close()
    assert pool.blocks.block_of[page] is None
    pool.check()


def test_of_equal_chains_the_deeper_blocks_are_worth_more_where_attention_is_dear():
    pool = PagePool(40)
    long, short = [name(i) for i in range(20)], [name(100 + i) for i in range(20)]
    pool.priced(1e-5, 1e-6)
    run(pool, long)
    for block in short:
        run(pool, [block])  # twenty first blocks
    with pool.open([], 10):
        assert pool.match(long) == 20


@pytest.mark.parametrize("seed", range(3))
def test_any_run_of_leases_leaves_every_page_in_one_place(seed):
    draw, pool, leases = random.Random(seed), PagePool(60), []
    for _ in range(400):
        if leases and draw.random() < 0.5:
            leases.pop(draw.randrange(len(leases))).close()
        blocks = [name(draw.randrange(6) * 50 + i) for i in range(draw.randint(1, 12))]
        if pool.available >= len(blocks):
            lease = pool.open(blocks, len(blocks))
            lease.seal_run(lease.held, blocks[lease.held :])
            leases.append(lease)
        if draw.random() < 0.2 and (page := pool.keep(draw.choice(blocks))) is not None:
            pool.check()
            pool.unkeep(page)
        pool.check()


def test_what_is_used_again_and_again_while_nothing_is_evicted_leaves_nothing_behind():
    pool, draw = PagePool(40), random.Random(3)
    for _ in range(300):
        run(pool, [name(i) for i in range(draw.randint(1, 30))])
    order = pool.supply.cached
    assert len(order) == 30
    assert len(order._runs) <= 30
    assert sum(len(each.pages) for each in order._runs) <= 60
    pool.check()


def hinting(pool: PagePool, right: bool) -> int:
    """Prompts that come back once and as many that don't, in turn; a client hints at ``right`` ones or the others.

    Returns how many blocks of those that come back were found.
    """
    found, fresh = 0, iter(range(100_000, 999_999))

    def ask(blocks: list[bytes], hinted: bool) -> int:
        with pool.open(blocks, len(blocks)) as lease:
            lease.hinted_blocks = EVERY_BLOCK if hinted else 0
            lease.seal_run(lease.held, blocks[lease.held :])
            return lease.held

    waiting = [[name(1000 * turn + i) for i in range(4)] for turn in range(12)]
    for turn in range(300):
        waiting.append([name(1000 * (turn + 12) + i) for i in range(4)])
        ask(waiting[-1], right)
        found += ask(waiting.pop(0), right)
        for _ in range(2):
            ask([name(next(fresh)) for _ in range(4)], not right)
    return found


def beginnings(pool: PagePool, hinted: int) -> int:
    """Prompts whose first 4 blocks come back once and whose other 8 don't, beside prompts that don't at all.

    A client hints at the first ``hinted`` blocks of the former.

    Returns how many blocks of those that come back were found.
    """
    found, fresh = 0, iter(range(100_000, 999_999))

    def ask(blocks: list[bytes], hints: int) -> int:
        whole = blocks + [name(next(fresh)) for _ in range(8)]
        with pool.open(whole, len(whole)) as lease:
            lease.hinted_blocks = hints
            lease.seal_run(lease.held, whole[lease.held :])
            return lease.held

    waiting = [[name(1000 * turn + i) for i in range(4)] for turn in range(12)]
    for turn in range(300):
        waiting.append([name(1000 * (turn + 12) + i) for i in range(4)])
        ask(waiting[-1], hinted)
        found += ask(waiting.pop(0), 0)
        ask([name(next(fresh)) for _ in range(4)], 0)
    return found


def test_a_hint_about_the_beginning_helps_more_than_one_about_all():
    placed, all_of_it, none = (beginnings(PagePool(100), hints) for hints in (4, EVERY_BLOCK, 0))
    assert placed > all_of_it >= none
    assert placed > 1.2 * none


def test_right_hints_help_and_wrong_ones_are_found_out():
    hinted, misled, lru = (
        hinting(PagePool(100, eviction=eviction), right)
        for eviction, right in (("worth", True), ("worth", False), ("lru", True))
    )
    assert hinted > 1.5 * lru
    assert misled > 1.5 * lru
