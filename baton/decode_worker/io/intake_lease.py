"""The blocks that may be written for one request, and those that have been. Knows nothing of frames, transports or
memory.

If the senders hold more shards than this worker (tensor parallelism m to fewer n), or are the hosts of one worker's
ranks, a block is gathered from several senders' parts, each by a stream of its own; it counts once all of its parts
have arrived. Where this worker's ranks are on several hosts, each may have such a lease for the part of every page
that goes there (``divided``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.kv.layout.extents import Part, require_whole
from baton.kv.wire.control import Closing
from baton.protos.errors import BatonError, HandoffRefused, LayoutMismatch


class LeaseStream(Protocol):
    """A handoff stream that writes under a lease, of the lease's epoch ``epoch``."""

    epoch: int

    def stop(self, error: BatonError) -> None:
        """Refuses the stream with ``error``; it writes nothing from now on."""

    def committed(self) -> None:
        """Sends the last acknowledgement, because the engine has taken the handoff over."""


class IntakeLease:
    """The blocks that streams may write under one lease: those of ``hashes`` from ``held`` on, to ``pages``, by
    block index.

    ``received`` blocks are complete and verified; of a divided lease, what of them goes to this host is. ``unseen``
    is a range of blocks that are never read: they count as received. The first ``slots`` blocks are selected by the
    prefill worker, and are not kept if another one takes over.
    """

    def __init__(
        self,
        key: int,
        lease_id: bytes,
        epoch: int,
        pages: Sequence[int],
        hashes: Sequence[bytes],
        held: int,
        unseen: tuple[int, int] = (0, 0),
        slots: int = 0,
    ) -> None:
        self._slots = slots
        self.key = key
        self.lease_id = lease_id
        self.epoch = epoch
        self.pages = tuple(pages)
        self.hashes = tuple(hashes)
        self.held = held
        self.received = set(range(*unseen))
        self.committing = False
        self.divided = False  # whether streams of the present epoch bring one host's part of every page
        self._complete = set(self.received)  # of the received blocks, those that are on all hosts
        self._senders = 1
        self._streams: dict[int, LeaseStream] = {}  # by the sender's shard
        self._parts: defaultdict[int, set[int]] = defaultdict(set)  # of blocks that aren't whole yet
        self._closings: dict[int, Closing] = {}
        self._extents: dict[int, Part] = {}  # of a page that each sender brings, where they said so

    @property
    def open_streams(self) -> tuple[LeaseStream, ...]:
        """Returns the streams that may write at present."""
        return tuple(self._streams.values())

    def completed(self, blocks: Iterable[int]) -> None:
        """Records that every host has its part of ``blocks``."""
        self._complete.update(blocks)
        self.received.update(blocks)

    def rearm(self, epoch: int) -> None:
        """Accepts only ``epoch`` from now on; blocks that the earlier prefill worker selected must be sent
        again.
        """
        self.epoch = epoch
        self._closings.clear()
        chosen = range(self._slots)
        self.received.difference_update(chosen)
        self._complete.difference_update(chosen)
        for parts in self._parts.values():
            parts.difference_update(chosen)

    def join(
        self,
        stream: LeaseStream,
        rank: int,
        senders: int,
        extents: Part = (),
        page_bytes: int = 0,
        own: Part = (),
    ) -> bool:
        """Lets ``stream`` write shard ``rank`` of ``senders``, which is ``extents`` of a page of ``page_bytes`` if
        there are any; returns whether it is the first.

        If the lease is divided, all senders' extents together are ``own``, this host's part; otherwise that is ().
        Raises HandoffRefused, and LayoutMismatch if they aren't, or aren't a page.
        """
        if rank in self._streams:
            raise HandoffRefused("a handoff of this lease and epoch is already open", "lease")
        divided = bool(own)
        if senders != self._senders or bool(extents) != bool(self._extents) or divided != self.divided:
            if self._streams:
                raise HandoffRefused(f"{self._senders} senders bring this lease, not {senders}", "shard_count")
            self._senders = senders
            self._parts.clear()  # parts of another size are no parts of these
            self._extents.clear()
            self._divide(divided)
        if extents:
            self._take_extents(rank, extents, page_bytes, own)
        self._closings.pop(rank, None)
        self._streams[rank] = stream
        return len(self._streams) == 1

    def _divide(self, divided: bool) -> None:
        """Begins to take one host's part of every page, or whole pages again: then what this host alone had counts
        no more.
        """
        if self.divided and not divided:
            self.received = set(self._complete)
        self.divided = divided

    def _take_extents(self, rank: int, extents: Part, page_bytes: int, own: Part) -> None:
        """Notes what of a page shard ``rank``'s sender brings; no block is whole before all senders' are a page, or
        ``own``.
        """
        if self._extents.get(rank) != extents:
            self._parts.pop(rank, None)
            self._extents[rank] = extents
        if len(self._extents) < self._senders:
            return
        try:
            require_whole(tuple(self._extents.values()), page_bytes, own)
        except LayoutMismatch:
            gone = self._extents.keys() - self._streams.keys() - {rank}
            if not gone:
                raise
            for earlier in gone:  # it brought other parts than these need: what it brings is seen when it joins
                self._extents.pop(earlier)
                self._parts.pop(earlier, None)

    def leave(self, stream: LeaseStream, rank: int) -> bool:
        """Removes ``stream`` from those that may write; returns whether it was one, and the last."""
        if self._streams.get(rank) is not stream:
            return False
        del self._streams[rank]
        return not self._streams

    def has(self, stream: LeaseStream, rank: int) -> bool:
        """Returns whether ``stream`` may write shard ``rank``."""
        return self._streams.get(rank) is stream

    def needs(self, index: int, rank: int) -> bool:
        """Returns whether shard ``rank``'s part of block ``index`` has not arrived."""
        return index not in self.received and index not in self._parts[rank]

    def arrived(self, numbers: Iterable[int], rank: int) -> list[int]:
        """Counts shard ``rank``'s part of blocks as verified; returns the blocks that are complete by that."""
        if self._senders == 1:
            self.received.update(numbers)
            return list(numbers)
        self._parts[rank].update(numbers)
        if len(self._parts) < self._senders:
            return []
        whole = sorted(set.intersection(*self._parts.values()) - self.received)
        self.received.update(whole)
        for parts in self._parts.values():
            parts.difference_update(whole)
        return whole

    def missing(self, rank: int) -> list[int]:
        """Returns the indices of the blocks whose part of shard ``rank`` has not arrived."""
        return [i for i in range(self.held, len(self.hashes)) if self.needs(i, rank)]

    def commit(self, rank: int, closing: Closing) -> Closing | None:
        """Registers that shard ``rank``'s sender is done; returns the closing of the lowest rank once all are, else
        None.
        """
        self._closings[rank] = closing
        if len(self._closings) < self._senders:
            return None
        self.committing = True
        return self._closings[min(self._closings)]
