"""Receives handoffs to a decode worker whose ranks are on several hosts, each of which takes what its ranks read.

Knows nothing of gRPC or of what a page holds. Every host has an intake of its own over its own pages, which streams
of senders fill; this one, on the lead's host, passes leases on to the others and tells the engine what all of them
have. To the engine it looks like an intake of one host: a block is received once every host has verified its part,
a handoff is committed once all hosts have its commit, and pages of a lease that ends count as written until the
other hosts have confirmed that nobody writes theirs.

    Admitted -> TakeLease … -> OrderDone of all hosts -> the router hears of the lease
    OPEN, BLOCK, COMMIT at each host -> one BlocksReceived per block, one Commit
    close -> ReceiveOpened(HELD) · CloseLease … -> OrderDone of all hosts -> ReceiveClosed(HELD)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from baton.decode_worker.io.divided_lease import DividedLease
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.decode_worker.io.receiver_orders import (
    CloseLease,
    LeaseCommitted,
    Order,
    RearmLease,
    StopStreams,
    StreamsRefused,
    TakeLease,
)
from baton.kv.layout.extents import Part, part_bytes
from baton.kv.memory.host_pages import PageMemory
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened, SendToEngine
from baton.protos.errors import BatonError, HandoffRefused, to_info
from baton.protos.nouns import KvLayout

HELD = 0  # the epoch under which the engine holds pages that other hosts may write; those of handoffs begin at 1

Said = ReceiveOpened | BlocksReceived | Commit | ReceiveClosed | StreamsRefused


class OtherHost(Protocol):
    """Passes orders to the intake of another host, called ``name``, and its reports back. ``part`` of every page
    goes there.
    """

    name: str
    part: Part

    def send(self, order: Order) -> None:
        """Queues ``order`` after earlier ones."""

    def when_done(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once the host acts by all orders so far; at once if it does already."""

    def hear(self, report: Callable[[Said], None]) -> None:
        """Has ``report`` called with what the host's streams do, in order."""


class HostIntake(Intake):
    """Receives, on the lead's host, the part ``part`` of every page, while each of ``others`` receives its own.

    ``send_to_engine`` must not block.
    """

    def __init__(
        self,
        memory: PageMemory,
        layout: KvLayout,
        fingerprint: str,
        send_to_engine: SendToEngine,
        part: Part,
        others: Sequence[OtherHost],
    ) -> None:
        super().__init__(memory, layout, fingerprint, partial(self._heard, 0), part, 1 + len(others))  # type: ignore[arg-type]
        self._engine, self._others = send_to_engine, others
        self._far_bytes: Counter[str] = Counter()
        self._divided: dict[int, DividedLease] = {}
        self._ending: dict[int, DividedLease] = {}
        for number, host in enumerate(others, 1):
            host.hear(partial(self._heard, number))

    # ---- what the engine and the session say -----------------------------------------------------------

    def register(self, lease: IntakeLease) -> None:
        """Opens a lease on every host; ``when_known`` says when streams may come."""
        super().register(lease)
        unseen = min(lease.received, default=0), max(lease.received, default=-1) + 1
        at = lease.pages, lease.hashes, lease.held, unseen
        take = TakeLease(lease.key, lease.lease_id, lease.epoch, *at)
        self._divided[lease.key] = DividedLease(lease, self.hosts, take)
        self._order(take)

    def when_known(self, key: int, then: Callable[[], None]) -> None:
        """Calls ``then`` once every host takes streams of the lease of request ``key`` and its epoch."""
        self._after_all(then)

    def rearm(self, key: int, epoch: int) -> None:
        """Accepts only streams of ``epoch`` for the lease from now on; each host keeps what it has received."""
        found = self._divided.get(key)
        if found is not None and not found.committed and epoch > found.lease.epoch:
            super().rearm(key, epoch)
            if found.withdrawn:
                self._order(found.take)
            found.rearm()
            self._order(RearmLease(key, epoch, tuple(sorted(found.complete))))

    def close(self, key: int, error: BatonError | None = None) -> None:
        """Closes the lease of request ``key`` on every host. The engine holds its pages until all have confirmed
        that nobody writes them.
        """
        found = self._divided.pop(key, None)
        if found is None:
            super().close(key, error)
            return
        found.ends, self._ending[key] = True, found
        if not found.committed:
            self._engine(ReceiveOpened(key, HELD))
        super().close(key, error)
        self._order(CloseLease(key, None if error is None else to_info(error)))
        self._after_all(partial(self._ended, key))

    def on_committed(self, key: int, epoch: int) -> None:
        """Sends the last acknowledgement of a handoff that the engine has taken over, on every host."""
        super().on_committed(key, epoch)
        self._order(LeaseCommitted(key, epoch))

    @property
    def received(self) -> Counter[str]:
        """Returns the bytes of verified blocks by the host of the worker's ranks that took them."""
        return super().received + self._far_bytes

    # ---- what the hosts' streams do ---------------------------------------------------------------------

    def _heard(self, host: int, said: Said) -> None:
        if isinstance(said, StreamsRefused):
            self.refusals.update(said.counts)
            return
        found = self._divided.get(said.key) or self._ending.get(said.key)
        if found is None:
            return  # the lease ended before
        match said:
            case BlocksReceived():
                self._arrived(found, host, said)
            case ReceiveOpened():
                self._opened(found, host, said)
            case ReceiveClosed():
                self._closed(found, host, said)
            case Commit():
                self._committed(found, host, said)

    def _opened(self, found: DividedLease, host: int, said: ReceiveOpened) -> None:
        """Tells the engine of an epoch's first stream. One that comes after those to another host have ended is
        ended, too; raises HandoffRefused on this host.
        """
        if found.opened(host, said.epoch):
            self._engine(said)
        if found.has_stopped(said.epoch):
            if host:
                self._order(StopStreams(said.key, said.epoch))
            elif found.lease.divided:
                raise _ended_elsewhere()

    def _arrived(self, found: DividedLease, host: int, said: BlocksReceived) -> None:
        in_parts = host > 0 or found.lease.divided
        if host:
            other = self._others[host - 1]
            self._far_bytes[other.name] += len(said.blocks) * part_bytes(other.part)
        whole = found.arrived(host, said.blocks) if in_parts else found.whole(said.blocks)
        if whole and not found.ends:
            self._engine(BlocksReceived(said.key, said.epoch, whole, whole if in_parts else ()))

    def _closed(self, found: DividedLease, host: int, said: ReceiveClosed) -> None:
        last = found.closed(host, said.epoch)
        if (host or found.lease.divided) and found.stops(said.epoch):
            self.stop(said.key, said.epoch, _ended_elsewhere())
            self._order(StopStreams(said.key, said.epoch))
        if last:
            self._engine(said)

    def _committed(self, found: DividedLease, host: int, said: Commit) -> None:
        if host == 0 and not found.lease.divided:
            found.withdrawn = True
            self._order(CloseLease(said.key))
            self._after_all(partial(self._whole, found, said))
        elif (whole := found.commit(host, said)) is not None:
            self._engine(whole)

    def _whole(self, found: DividedLease, said: Commit) -> None:
        """Tells the engine of a commit of whole pages, as nobody may write them on other hosts any more."""
        if not found.ends and said.epoch in found.open_epochs() and said.epoch == found.lease.epoch:
            found.committed = True
            self._engine(said)

    def _ended(self, key: int) -> None:
        """Gives the lease's pages back to the engine, because no host writes them any more."""
        found = self._ending.pop(key)
        for epoch in found.open_epochs():
            self._engine(ReceiveClosed(key, epoch))
        if not found.committed:
            self._engine(ReceiveClosed(key, HELD))

    # ---- orders ------------------------------------------------------------------------------------------

    def _order(self, order: Order) -> None:
        for host in self._others:
            host.send(order)

    def _after_all(self, then: Callable[[], None]) -> None:
        left = len(self._others)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for host in self._others:
            host.when_done(one_less)


def _ended_elsewhere() -> HandoffRefused:
    return HandoffRefused("the streams to another host of this worker's ranks have ended", "shard_rank")
