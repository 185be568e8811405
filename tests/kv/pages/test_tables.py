"""Leases of several page tables: what is found, given back and shared, over all that can happen to them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.layout.prefix import block_hashes
from baton.kv.pages.pool import PageLease, PagePool
from baton.kv.pages.tables import TablesLease, deepest, open_tables, open_tables_behind, table_hash
from baton.kv.pages.window import first_seen
from baton.protos.errors import PoolExhausted

WINDOWS, SIZE = (0, 33, 80), 16
CHAIN = block_hashes(b"root", list(range(40 * SIZE)))
PAGES = 90


def needed(end: int) -> set[bytes]:
    """The pages that must be there for a prefix of ``end`` blocks, by the rule as it is told."""
    names = set(CHAIN[:end])
    for number, window in enumerate(WINDOWS[1:], 1):
        for position in range(max(0, end * SIZE - window + 1), end * SIZE):
            names.add(table_hash(CHAIN[position // SIZE], number))
    return names


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.sets(st.tuples(st.integers(0, 2), st.integers(0, 19)), max_size=8))
def test_the_longest_prefix_is_found_whose_continuation_sees_nothing_lost(
    length: int, lost: set[tuple[int, int]]
) -> None:
    pool = PagePool(PAGES)
    names = [[block if not n else table_hash(block, n) for block in CHAIN[:length]] for n in range(3)]
    there = {name for n, of in enumerate(names) for at, name in enumerate(of) if (n, at) not in lost}
    for page, name in enumerate(sorted(there)):
        pool.blocks.publish(page, name)
    wanted = max(end for end in range(length + 1) if needed(end) <= there)
    assert deepest(pool.blocks.page_of, CHAIN[:length], WINDOWS, SIZE) == wanted


def readable(lease: TablesLease, tokens: int) -> list[tuple[int, bytes]]:
    """The pages that tokens from position ``tokens`` on may read, and the hashes of the blocks in them."""
    whole = tokens // SIZE
    found = [(lease.pages[at], CHAIN[at]) for at in range(whole)]
    for number, window in enumerate(WINDOWS[1:], 1):
        table = lease.tables[number - 1]
        found += [
            (table[at], table_hash(CHAIN[at], number)) for at in range(first_seen(tokens, window, SIZE), whole)
        ]
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 40)), max_size=40))
def test_no_page_that_a_lease_still_reads_is_freed_or_another_s(story: list[tuple[int, int, int]]) -> None:
    pool = PagePool(PAGES)
    live: list[tuple[TablesLease, int]] = []  # with the tokens that are written
    stored: dict[int, bytes] = {}  # by page
    for act, which, amount in story:
        try:
            if act == 0:
                blocks, grows = max(1, amount % 20), bool(which % 2)
                lease = open_tables(pool, CHAIN[:30], WINDOWS, blocks, limit_held=amount % 20, grows=grows)
                live.append((lease, lease.held * SIZE))
            elif act == 1:
                lease = open_tables_behind(pool, CHAIN[:30], WINDOWS, amount * 5, limit_held=amount // 8)
                lease.close()
            elif live:
                lease, tokens = live.pop(which % len(live))
                if act == 2:
                    lease.close()
                    continue
                if act == 3:
                    lease.hold()
                    lease.close()
                    pool.check()
                    lease.release()
                    continue
                end = min(len(CHAIN) * SIZE, tokens + amount)
                live.append((lease, tokens))
                lease.reach(-(-end // SIZE))
                assert lease.blocks * SIZE >= end
                tables = (lease.pages, *lease.tables)
                for number, table in enumerate(tables):
                    for at in range(tokens // SIZE, end // SIZE):
                        stored[table[at]] = CHAIN[at] if not number else table_hash(CHAIN[at], number)
                lease.seal_run(tokens // SIZE, CHAIN[tokens // SIZE : end // SIZE])
                live[-1] = lease, end
                lease.slide(end, 0 if act == 5 else None)
        except PoolExhausted:
            pass
        pool.check()
        for lease, tokens in live:
            for page, name in readable(lease, tokens):
                assert stored[page] == name
                assert pool.leased.of[page]
    for lease, _ in live:
        lease.close()
    pool.check()
    assert pool.available == PAGES


def test_a_lease_that_finds_too_few_pages_changes_nothing() -> None:
    pool = PagePool(10)
    lease = open_tables(pool, (), WINDOWS, 3)
    assert isinstance(lease, PageLease)
    for count in (1, 2):
        with pytest.raises(PoolExhausted):
            lease.extend(count)
        with pytest.raises(PoolExhausted):
            open_tables(pool, (), WINDOWS, count)
    pool.check()
    assert pool.available == 1
    assert len(lease.pages) == len(lease.tables[0]) == len(lease.tables[1]) == 3


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=6))
def test_a_graft_over_a_sealed_block_frees_no_page_of_its_readers(
    blocks: int, sealed: int, grafts: list[tuple[int, int]]
) -> None:
    """A step's first token may complete a block, which is sealed before the drafts after it are taken."""
    pool = PagePool(40)
    lease = pool.open((), blocks)
    sealed = min(sealed, blocks)
    lease.seal_run(0, CHAIN[:sealed])
    readers = [pool.open(CHAIN[:sealed], sealed) for _ in range(2)] if sealed else []
    for first, count in grafts:
        pages = lease.branch(count)
        lease.graft(min(first, blocks - 1), pages)
        pool.check()
        lease.prune()
        pool.check()
        with pool.open((), pool.available) as others:  # whatever may be evicted is
            assert not {page for reader in readers for page in reader.pages} & set(others.pages)
            assert not set(lease.pages) & set(others.pages)
    assert all(pool.blocks.block_of[page] == CHAIN[at] for r in readers for at, page in enumerate(r.pages))
    for reader in readers:
        reader.close()
    lease.close()
    pool.check()
    assert pool.available == 40
