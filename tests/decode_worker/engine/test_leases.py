"""The receiving side's lease: in whatever order gate, streams and lease end, pages wait for all of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.strategies import integers, sets

from baton.decode_worker.engine.leases import HandoffLease
from baton.kv.pages.pool import PagePool
from baton.protos.errors import AlreadyCommitted, LeaseUnknown, StaleEpoch

ID = b"i" * 16


class ReceiveMachine(RuleBasedStateMachine):
    """A lease against the obvious model: sets of open streams and missing blocks."""

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(6)
        self.pages = self.pool.open([], 4)
        self.receive = HandoffLease(ID, self.pages, 5.0, 0.0)
        self.now, self.gate, self.ended = 0.0, True, False
        self.streams: set[int] = set()
        self.missing = set(range(4))
        self.epoch = 1

    @rule(epoch=integers(1, 3))
    def open(self, epoch: int) -> None:
        if self.gate or self.streams:
            self.streams.add(epoch)
        self.receive.opened(epoch, self.now)

    @rule(epoch=integers(1, 3))
    def close(self, epoch: int) -> None:
        self.streams.discard(epoch)
        self.receive.closed(epoch, self.now)

    @rule(blocks=sets(integers(0, 5)))
    def arrive(self, blocks: set[int]) -> None:
        self.missing -= blocks
        self.receive.arrived(blocks, self.now)

    @rule()
    def shut(self) -> None:
        self.gate = False
        self.receive.shut()

    @rule()
    def end(self) -> None:
        self.ended = True
        self.pages.close()

    @rule(epoch=integers(1, 4))
    def rearm(self, epoch: int) -> None:
        if epoch == self.epoch + 1:
            self.receive.rearm(ID, epoch, self.now)
            self.epoch = epoch
        else:
            with pytest.raises(StaleEpoch):
                self.receive.rearm(ID, epoch, self.now)

    @rule(seconds=integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def pages_wait_for_gate_and_streams(self) -> None:
        self.pool.check()
        settled = not self.gate and not self.streams
        assert self.receive.settled == settled
        counts = self.pool.snapshot_counts()
        expected = (0, 0) if self.ended and settled else (0, 4) if self.ended else (4, 0)
        assert (counts.leased, counts.quarantined) == expected

    @invariant()
    def it_is_complete_when_nothing_is_missing(self) -> None:
        assert self.receive.complete == (not self.missing)
        assert (self.receive.deadline is None) == bool(self.streams)


TestReceive = ReceiveMachine.TestCase
TestReceive.settings = settings(stateful_step_count=25, deadline=None)


def test_a_committed_lease_is_not_rearmed_and_a_foreign_one_is_unknown() -> None:
    receive = HandoffLease(ID, PagePool(2).open([], 1), 5.0, 0.0)
    with pytest.raises(LeaseUnknown):
        receive.rearm(b"x" * 16, 2, 0.0)
    receive.commit()
    with pytest.raises(AlreadyCommitted):
        receive.rearm(ID, 2, 0.0)
