"""Tests that pages shared with the I/O process leave those that running prompts will need."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine.steps.sharing import PageSharing
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.errors import BatonError
from tests.kv.sharers import chain

CHAIN = tuple(chain(8))


@pytest.mark.parametrize(("reserve", "shared"), [(12, 4), (13, 0)])
def test_pins_and_fills_leave_the_reserve(reserve: int, shared: int) -> None:
    pool = PagePool(16)
    sharing = PageSharing(pool)
    with pool.open(CHAIN, 4) as lease:
        lease.seal_run(0, CHAIN[:4])
    assert len(sharing.pin(ch.Pin(1, CHAIN), lambda: reserve).pages) == shared
    sharing.unpin(ch.Unpin(1))
    assert len(sharing.fill(ch.Fill(2, CHAIN[4:]), lambda: reserve).pages) == shared
    sharing.filled(ch.Filled(2, 0))
    assert not len(sharing)
    pool.check()
    assert pool.available == 16


def test_a_fill_that_is_refused_once_its_pages_are_shared_evicts_nothing() -> None:
    pool = PagePool(16)
    sharing = PageSharing(pool)
    with pool.open(CHAIN, 4) as lease:
        lease.seal_run(0, CHAIN[:4])
    others = chain(12, salt=1)
    with pool.open(others, 12) as lease:
        lease.seal_run(0, others)

    def reserved() -> int:  # what runs has a window over the shared pages, and needs as many others
        return 6 + pool.snapshot_counts().leased

    before = pool.version
    assert sharing.fill(ch.Fill(1, CHAIN), reserved).pages == ()
    assert not len(sharing)
    assert pool.version == before
    assert (pool.match(CHAIN), pool.match(others)) == (4, 12)
    pool.check()


class SmallMirror:
    """Has room on the host for copies of three pages."""

    shared, copies_left = None, 3

    def make_whole(self, pages: Sequence[int]) -> None:
        self.copies_left -= len(pages)

    def let_go(self, pages: Sequence[int]) -> None:
        self.copies_left += len(pages)


def test_pages_that_the_host_has_no_room_for_are_not_shared() -> None:
    pool = PagePool(16)
    sharing = PageSharing(pool, SmallMirror())  # type: ignore[arg-type]
    with pool.open(CHAIN, 8) as lease:
        lease.seal_run(0, CHAIN)
    assert sharing.pin(ch.Pin(1, CHAIN[:4])).pages == ()
    assert len(sharing.pin(ch.Pin(2, CHAIN[:3])).pages) == 3
    assert sharing.keep(ch.Keep(3, CHAIN[4:5])).hashes == ()
    sharing.unpin(ch.Unpin(2))
    assert len(sharing.keep(ch.Keep(4, CHAIN[4:5])).hashes) == 1
    sharing.unkeep(ch.Unkeep(3))
    sharing.unkeep(ch.Unkeep(4))
    assert not len(sharing)
    pool.check()


class FailingMirror:
    """Can't bring pages to the host, as a driver whose copy failed."""

    shared = None

    def make_whole(self, pages: Sequence[int]) -> None:
        raise BatonError("the copy failed")

    def let_go(self, pages: Sequence[int]) -> None:
        raise AssertionError("nobody was given these pages")


def test_pages_that_can_not_be_brought_to_the_host_are_shared_with_nobody_and_stay_cached() -> None:
    pool = PagePool(16)
    sharing = PageSharing(pool, FailingMirror())  # type: ignore[arg-type]
    with pool.open(CHAIN, 8) as lease:
        lease.seal_run(0, CHAIN)
    assert sharing.pin(ch.Pin(1, CHAIN)).pages == ()
    answer = sharing.keep(ch.Keep(2, CHAIN))
    assert (answer.key, answer.hashes, answer.pages) == (2, (), ())
    sharing.unpin(ch.Unpin(1))
    pool.check()
    assert (pool.available, pool.match(CHAIN)) == (16, 8)
