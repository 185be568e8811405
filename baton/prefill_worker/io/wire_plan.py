"""How one prompt's blocks go to one receiver: as its layout has them, of its size, under its hashes. Torch-free.

Knows nothing of streams or frames.
"""

from __future__ import annotations

import msgspec

from baton.kv.layout.bridge import Bridge
from baton.kv.layout.repaging import ReceiverBlock, Repaging
from baton.kv.memory.host_pages import PageMemory
from baton.protos.channel import ShipBlock
from baton.protos.nouns import KvLayout


class WirePlan(msgspec.Struct, frozen=True):
    """``layout`` is the receiver's, and ``bridge`` brings ours to it where ours differs.

    ``hashes`` are the prompt's block hashes at the receiver where its fidelity or its blocks' size, and so its
    chain, is another; ``paging`` makes its blocks of ours where the sizes differ.
    """

    layout: KvLayout
    bridge: Bridge | None = None
    hashes: tuple[bytes, ...] | None = None
    paging: Repaging | None = None

    @property
    def unit(self) -> int:
        """Returns the bytes of one block on its way."""
        return self.layout.page_bytes if self.bridge is None else self.bridge.unit

    def take(self, block: ShipBlock) -> list[ShipBlock | ReceiverBlock]:
        """Takes one of our blocks; returns what can be sent by it."""
        return [block] if self.paging is None else [*self.paging.take(block)]

    def hash(self, block: ShipBlock | ReceiverBlock) -> bytes:
        """Returns the receiver's hash of a block."""
        if self.hashes is not None:
            return self.hashes[block.index]
        assert isinstance(block, ShipBlock), "another chain's hashes come with the wire"
        return block.hash

    def payload(self, block: ShipBlock | ReceiverBlock, memory: PageMemory) -> tuple[memoryview, int | None]:
        """Returns a block's bytes as the receiver takes them, and where in our pages they lie (None: elsewhere)."""
        if isinstance(block, ShipBlock):
            page = memory.page(block.page)
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
