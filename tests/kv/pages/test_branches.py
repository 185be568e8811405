"""Tests pages of branches: a lease's own until they are given back, and in the table's place where one stands."""

from __future__ import annotations

import pytest

from baton.kv.pages.pool import PagePool
from baton.protos.errors import PoolExhausted


def test_a_branch_that_stands_takes_its_place_and_the_other_pages_go_back() -> None:
    pool = PagePool(10)
    lease = pool.open((), 3)
    before = list(lease.pages)
    one, other = lease.branch(2), lease.branch(1)
    pool.check()
    lease.graft(2, one)  # one block more than the table had
    assert lease.pages == [*before[:2], *one]
    pool.check()
    lease.prune()
    pool.check()
    assert pool.available == 10 - 4
    assert sorted({*before, *one, *other} - set(lease.pages)) == sorted([before[2], *other])
    lease.shrink(3)
    lease.close()
    assert pool.available == 10


def test_pages_that_another_process_may_still_write_wait_for_it() -> None:
    pool = PagePool(10)
    lease = pool.open((), 3)
    last, branch = lease.pages[-1], lease.branch(2)
    lease.hold()
    lease.graft(2, branch)
    lease.prune()
    lease.shrink(3)
    pool.check()
    assert lease.pages[-1] == branch[0]
    assert pool.available == 5
    lease.release()
    pool.check()
    assert pool.available == 7
    assert last in pool.supply.free
    lease.close()
    assert pool.available == 10


def test_a_lease_that_ends_gives_its_branches_back_too_and_what_is_reserved_stays() -> None:
    pool = PagePool(6)
    lease = pool.open((), 2)
    with pytest.raises(PoolExhausted):
        lease.branch(3, reserve=2)
    lease.branch(2, reserve=2)
    pool.check()
    lease.hold()
    lease.close()
    pool.check()
    assert pool.available == 2
    lease.release()
    assert pool.available == 6
