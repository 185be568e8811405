"""Plans how one prompt's blocks are sent to one receiver: layout, block size, hashes. Torch-free.

Knows nothing of streams or frames.
"""

from __future__ import annotations

import copy

import msgspec

from baton.kv.layout.bridge import Bridge
from baton.kv.layout.extents import Part, contiguous, gather, part_bytes
from baton.kv.layout.repaging import ReceiverBlock, Repaging
from baton.kv.layout.table_bridge import TableBridge
from baton.kv.memory.host_pages import PageMemory
from baton.prefill_worker.io.retabling import Retabling, TableBlock
from baton.protos.channel import ShipBlock
from baton.protos.nouns import KvLayout

SentBlock = ShipBlock | ReceiverBlock | TableBlock
"""A block as it is sent: the sender's own, or one of the receiver's that is made of the sender's pages."""


class WirePlan(msgspec.Struct, frozen=True):
    """The conversion of one prompt's blocks for one receiver: to its layout, its block size and its hashes."""

    layout: KvLayout  # the receiver's
    bridge: Bridge | TableBridge | None = None  # converts pages to the receiver's layout; None if it is the same
    hashes: tuple[bytes, ...] | None = None  # the receiver's block hashes, if its fidelity or block size differs
    paging: Repaging | Retabling | None = None  # makes the receiver's blocks; None if it has the sender's
    part: Part = ()  # of each page, as the receiver has it, that goes to this host from here; () for all of it
    shard: tuple[int, int] | None = None  # this host's number and the count of hosts that send; None: the layout's
    receivers: int = 0  # hosts of the receiver's ranks that get a part of every page each; 0: this one gets all

    def to_host(self, part: Part, shard: tuple[int, int], receivers: int) -> WirePlan:
        """Returns this plan for one of several streams, which brings ``part`` of each page; its ``paging`` is its
        own, because that counts what was sent.
        """
        own = copy.deepcopy(self.paging)
        return msgspec.structs.replace(self, paging=own, part=part, shard=shard, receivers=receivers)

    @property
    def plain(self) -> bool:
        """Returns whether pages are sent as they are, under the sender's own hashes."""
        return self.bridge is None and self.hashes is None and self.paging is None

    @property
    def unit(self) -> int:
        """Returns the bytes of one block as it is sent."""
        if self.part:
            return part_bytes(self.part)
        return self.layout.page_bytes if self.bridge is None else self.bridge.unit

    def take(self, block: ShipBlock) -> list[SentBlock]:
        """Returns the blocks that can be sent once our block ``block`` is finished."""
        return [block] if self.paging is None else [*self.paging.take(block)]

    def hash(self, block: SentBlock) -> bytes:
        """Returns the hash by which the receiver knows ``block``."""
        if self.hashes is not None:
            return self.hashes[block.index]
        assert isinstance(block, ShipBlock), "another chain's hashes come with the wire"
        return block.hash

    def payload(self, block: SentBlock, memory: PageMemory) -> tuple[memoryview, int | None]:
        """Returns a block's bytes for the receiver, and their offset in our pages; None if they don't lie there in
        one piece.
        """
        if self.part and not self.plain:
            whole = msgspec.structs.replace(self, part=())
            return gather(whole.payload(block, memory)[0], self.part), None
        if isinstance(block, TableBlock):
            return self._of_tables(block, memory), None
        assert not isinstance(self.bridge, TableBridge), "blocks of several pages are mapped"
        if isinstance(block, ShipBlock):
            page = memory.page(block.page)
            if self.part:
                first = block.page * memory.page_bytes + self.part[0].at
                return gather(page, self.part), first if contiguous(page, self.part) is not None else None
            if self.bridge is None:
                return page, block.page * memory.page_bytes
            return self.bridge.convert(page), None
        assert self.bridge is not None, "blocks of another size are of another layout"
        size = self.bridge.sender.run_bytes
        starts = [number * memory.page_bytes + run * size for number, run in block.runs]
        runs = [memory.view()[start : start + size] for start in starts]
        if len(runs) == 1 and size == self.bridge.unit and self.bridge.as_they_are:
            return runs[0], starts[0]
        return self.bridge.gather(runs), None

    def _of_tables(self, block: TableBlock, memory: PageMemory) -> memoryview:
        assert isinstance(self.bridge, TableBridge), "one side has pages by window"
        if self.bridge.receiver.windows:
            (page,) = block.pages
            return self.bridge.part(memory.page(page), page, block.table)
        return self.bridge.joined([memory.page(page) for page in block.pages])
