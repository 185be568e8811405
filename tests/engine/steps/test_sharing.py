"""Tests that pages shared with the I/O process leave those that running prompts will need."""

from __future__ import annotations

import pytest

from baton.engine.steps.sharing import PageSharing
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
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
