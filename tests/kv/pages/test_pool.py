"""The page pool, example by example and against a model of itself."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kv.pages.pool import PageLease, PagePool, PoolCounts
from baton.protos.errors import PoolExhausted


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


def finished(pool: PagePool, hashes: list[bytes]) -> None:
    """Run a request whose blocks all become findable."""
    with pool.open(hashes, len(hashes)) as lease:
        for index, block in enumerate(hashes):
            lease.seal(index, block)


def test_a_new_pool_is_all_free() -> None:
    assert PagePool(4).snapshot_counts() == PoolCounts(4, 4, 0, 0, 0, 0)


def test_a_closed_lease_gives_every_page_back_once() -> None:
    pool = PagePool(4)
    lease = pool.open([], 3)
    lease.close()
    lease.close()
    pool.check()
    assert pool.snapshot_counts() == PoolCounts(4, 4, 0, 0, 0, 0)


def test_a_finished_block_is_found_by_the_next_request() -> None:
    pool = PagePool(4)
    finished(pool, names(1, 2))
    with pool.open(names(1, 2, 3), 3) as lease:
        assert lease.held == 2
        assert pool.snapshot_counts().leased == 3


def test_a_block_is_found_while_the_request_that_made_it_still_runs() -> None:
    pool = PagePool(4)
    first = pool.open(names(1), 1)
    first.seal(0, names(1)[0])
    second = pool.open(names(1), 1)
    assert second.pages == first.pages
    first.close()
    assert pool.snapshot_counts() == PoolCounts(4, 3, 0, 1, 0, 1)


def test_an_unfinished_block_is_never_found() -> None:
    pool = PagePool(4)
    pool.open(names(1), 1)
    assert pool.match(names(1)) == 0


def test_never_more_is_held_than_the_limit() -> None:
    pool = PagePool(4)
    finished(pool, names(1, 2))
    with pool.open(names(1, 2), 2, limit_held=1) as lease:
        assert lease.held == 1
        assert not lease.seal(1, names(2)[0]), "the hash is cached elsewhere: this page stays private"
        pool.check()


def test_a_gap_in_the_chain_ends_the_match() -> None:
    pool = PagePool(4)
    finished(pool, names(1, 2))
    assert pool.match(names(1, 9, 2)) == 1


def test_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() -> None:
    pool = PagePool(4)
    finished(pool, names(1, 2))
    finished(pool, names(3, 4))
    with pool.open([], 1):
        assert (pool.match(names(1, 2)), pool.match(names(3, 4))) == (1, 2)
    with pool.open([], 3):
        assert (pool.match(names(1)), pool.match(names(3, 4))) == (0, 1)


def test_use_makes_a_chain_recent() -> None:
    pool = PagePool(4)
    finished(pool, names(1, 2))
    finished(pool, names(3, 4))
    pool.open(names(1, 2), 2).close()
    with pool.open([], 2):
        assert (pool.match(names(1, 2)), pool.match(names(3))) == (2, 0)


def test_an_exhausted_pool_refuses_and_stays_as_it_was() -> None:
    pool = PagePool(4)
    finished(pool, names(1, 2))
    before = pool.snapshot_counts()
    with pytest.raises(PoolExhausted, match="2 cached") as caught:
        pool.open(names(1, 2), 5)
    assert caught.value.retryable
    assert (pool.snapshot_counts(), pool.match(names(1, 2))) == (before, 2)
    pool.check()


def test_pages_that_a_match_pins_are_not_counted_as_room() -> None:
    pool = PagePool(4)
    finished(pool, names(1, 2, 3))
    with pytest.raises(PoolExhausted):
        pool.open(names(1, 2, 3), 5)
    with pool.open(names(1, 2, 3), 4) as lease:
        assert lease.held == 3


def test_the_reserve_stays_for_others() -> None:
    pool = PagePool(4)
    with pytest.raises(PoolExhausted, match="2 must stay"):
        pool.open([], 3, reserve=2)
    with pool.open([], 2, reserve=2) as lease:
        lease.extend(2)
        with pytest.raises(PoolExhausted):
            lease.extend(1)
        assert len(lease.pages) == 4
        pool.check()


def test_pages_of_a_closed_lease_wait_until_the_last_io_lets_go() -> None:
    pool = PagePool(4)
    lease = pool.open(names(1), 2)
    lease.seal(0, names(1)[0])
    lease.hold()
    lease.hold()
    lease.close()
    assert pool.snapshot_counts() == PoolCounts(4, 2, 0, 0, 2, 0)
    with pytest.raises(PoolExhausted):
        pool.open([], 3)
    lease.release()
    assert pool.snapshot_counts().quarantined == 2
    lease.release()
    assert pool.snapshot_counts() == PoolCounts(4, 3, 1, 0, 0, 0)
    pool.check()


def test_a_finished_block_in_quarantine_may_be_shared_but_not_evicted() -> None:
    pool = PagePool(2)
    lease = pool.open(names(1), 1)
    lease.seal(0, names(1)[0])
    lease.hold()
    lease.close()
    other = pool.open(names(1), 1)
    assert (other.held, pool.snapshot_counts().quarantined) == (1, 0)
    other.close()
    assert pool.snapshot_counts().quarantined == 1
    pool.open([], 1)
    with pytest.raises(PoolExhausted):
        pool.open([], 1)
    lease.release()
    pool.check()


def test_a_hold_that_ended_before_the_close_leaves_no_quarantine() -> None:
    pool = PagePool(2)
    lease = pool.open([], 2)
    lease.hold()
    lease.release()
    lease.close()
    assert pool.snapshot_counts().free == 2


def test_our_own_mistakes_are_asserted() -> None:
    lease = PagePool(2).open([], 1)
    with pytest.raises(AssertionError, match="release without hold"):
        lease.release()
    lease.close()
    mistakes = (lease.hold, lambda: lease.extend(1), lambda: lease.shrink(0), lambda: lease.seal(0, b"x"))
    for mistake in mistakes:
        with pytest.raises(AssertionError, match="closed lease"):
            mistake()


def test_changes_are_told_once_and_net() -> None:
    pool = PagePool(2)
    finished(pool, names(1, 2))
    assert pool.drain_changes() == (tuple(names(1, 2)), ())
    assert pool.drain_changes() == ((), ())
    finished(pool, names(3))
    assert pool.drain_changes() == (tuple(names(3)), tuple(names(2)))
    finished(pool, names(4, 5))
    finished(pool, names(1, 3))
    assert pool.drain_changes() == ((), ()), "gone and back, or made and gone, between two calls is no change"
    assert set(pool.findable()) == set(names(1, 3))


class PoolMachine(RuleBasedStateMachine):
    """Random requests against a small pool; a page's contents are modelled by who may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.open: list[tuple[PageLease, list[bytes]]] = []
        self.closing: list[PageLease] = []
        self.known: set[bytes] = set()
        self.contents: dict[int, bytes] = {}

    def _writable_elsewhere(self, page: int) -> bool:
        return any(page in lease.pages for lease in self.closing)

    @rule(chain=st.lists(st.integers(0, 3), max_size=5), extra=st.integers(0, 3), reserve=st.integers(0, 3))
    def admit(self, chain: list[int], extra: int, reserve: int) -> None:
        hashes = [bytes([*chain[: i + 1]]) for i in range(len(chain))]
        before, room = self.pool.snapshot_counts(), self.pool.available
        try:
            lease = self.pool.open(hashes, len(hashes) + extra, reserve)
        except PoolExhausted:
            assert self.pool.snapshot_counts() == before
            assert room - len(hashes) - extra < reserve
            return
        assert self.pool.available >= reserve
        for index, page in enumerate(lease.pages):
            if index < lease.held:
                assert self.contents[page] == hashes[index], "a held page has another block's bytes"
            else:
                assert not self._writable_elsewhere(page), "a page was reused under a receive in flight"
                self.contents.pop(page, None)
        self.open.append((lease, hashes))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        lease, _ = data.draw(st.sampled_from(self.open))
        had = list(lease.pages)
        try:
            lease.extend(count)
        except PoolExhausted:
            assert lease.pages == had
        for page in lease.pages[len(had) :]:
            assert not self._writable_elsewhere(page)
            self.contents.pop(page, None)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        lease, hashes = data.draw(st.sampled_from(self.open))
        if not lease.holds:
            room = self.pool.available
            keep = data.draw(st.integers(min(len(hashes), len(lease.pages)), len(lease.pages)))
            gone = len(lease.pages) - keep
            lease.shrink(keep)
            assert self.pool.available == room + gone

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish_a_block(self, data: st.DataObject) -> None:
        lease, hashes = data.draw(st.sampled_from(self.open))
        if lease.held < len(hashes):
            index = data.draw(st.integers(lease.held, len(hashes) - 1))
            if lease.seal(index, hashes[index]):
                self.contents[lease.pages[index]] = hashes[index]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.open))[0].hold()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.open))
        self.open.remove(entry)
        entry[0].close()
        if entry[0].holds:
            self.closing.append(entry[0])

    @precondition(lambda self: self.closing or self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([*self.closing, *(entry[0] for entry in self.open)]))
        if lease.holds:
            lease.release()
            if lease.closed and not lease.holds:
                self.closing.remove(lease)

    @rule()
    def drain(self) -> None:
        added, removed = self.pool.drain_changes()
        assert not self.known & set(added)
        assert self.known >= set(removed)
        self.known = (self.known | set(added)) - set(removed)
        assert self.known == set(self.pool.findable())

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        self.pool.check()
        counts = self.pool.snapshot_counts()
        assert counts.free + counts.cached + counts.leased + counts.quarantined == counts.pages
        assert counts.leases == len(self.open)

    def teardown(self) -> None:
        for lease, _ in self.open:
            lease.close()
            while lease.holds:
                lease.release()
        for lease in self.closing:
            while lease.holds:
                lease.release()
        self.pool.check()
        counts = self.pool.snapshot_counts()
        assert (counts.leased, counts.quarantined, counts.leases) == (0, 0, 0), "pages leaked"


PoolMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestPoolAgainstItsModel = PoolMachine.TestCase


def test_a_run_of_blocks_is_sealed_as_one_by_one() -> None:
    at_once, singly = PagePool(8), PagePool(8)
    for pool in (at_once, singly):
        finished(pool, names(9))  # one of them is cached elsewhere already
    run, each = at_once.open([], 4), singly.open([], 4)
    run.seal_run(1, names(1, 9, 3))
    for index, block in enumerate(names(1, 9, 3), 1):
        each.seal(index, block)
    for pool, lease in ((at_once, run), (singly, each)):
        pool.check()
        lease.close()
        pool.check()
    assert at_once.drain_changes() == singly.drain_changes()
    assert at_once.snapshot_counts() == singly.snapshot_counts()


def test_a_pool_that_nobody_watches_keeps_no_changes() -> None:
    pool = PagePool(2, watched=False)
    for number in range(5):  # with evictions
        finished(pool, names(number, number + 100))
    pool.check()
    assert pool.drain_changes() == ((), ())


def test_a_page_of_a_window_that_another_lease_has_is_counted_as_if_it_did_not_come_back() -> None:
    pool, hashes = PagePool(64), [bytes([at]) * 32 for at in range(20)]
    with pool.open(hashes, 4) as lease:
        lease.seal_run(0, hashes[:4])
    alone = pool.open(hashes, 20, window=64, most=8)
    assert (alone.held, alone.growth(20, (8,))) == (4, 3)
    other = pool.open(hashes[:4], 4)
    assert alone.growth(20, (8,)) == 3 + 4
    with pytest.raises(PoolExhausted):
        pool.open(hashes, 20, reserve=pool.available - 1 - 3 - 3, window=64, most=8)
    pool.open(hashes, 20, reserve=pool.available - 1 - 3 - 4, window=64, most=8).close()
    other.close()
    assert alone.growth(20, (8,)) == 3
    alone.close()
    pool.check()
