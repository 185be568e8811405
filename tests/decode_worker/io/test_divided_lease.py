"""Tests what the hosts of a decode worker's ranks have together of a lease, from epoch to epoch."""

from __future__ import annotations

from baton.decode_worker.io.divided_lease import DividedLease
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.decode_worker.io.receiver_orders import TakeLease

HASHES = [bytes([at]) * 32 for at in range(3)]


def test_a_host_whose_lease_begins_anew_after_whole_pages_has_only_what_is_complete() -> None:
    lease = IntakeLease(1, b"L" * 16, 1, range(3), HASHES, 0)
    found = DividedLease(lease, 2, TakeLease(1, b"L" * 16, 1, (0, 1, 2), tuple(HASHES), 0, (0, 0)))
    lease.divided = True
    assert found.opened(0, 1)
    assert not found.opened(1, 1)
    assert found.arrived(1, [0, 1]) == ()
    assert found.arrived(0, [1]) == (1,)
    assert [found.closed(host, 1) for host in (0, 1)] == [False, True]
    lease.rearm(2)
    found.rearm()
    lease.divided = False
    found.opened(0, 2)
    found.withdrawn = True  # whole pages were committed, and the other host was told to close its lease
    found.closed(0, 2)
    lease.rearm(3)
    found.rearm()
    lease.divided = True
    found.opened(0, 3)
    assert found.arrived(0, [0, 1]) == (), "the other host's part of block 0 comes again"
    assert found.arrived(1, [0, 1]) == (0,)
    assert found.complete == {0, 1}
