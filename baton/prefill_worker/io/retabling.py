"""Maps the blocks of a prompt between a worker whose blocks have several pages and one whose pages have all layers.

Knows nothing of bytes or of hashes. A handoff numbers blocks as the receiver does: first the prompt's, then, table
by table, what the answer's first token sees of the tables with a window (kv/pages/tables.py). A sender with such
tables numbers its own alike, but brings all blocks of each table, because the receiver's pages have all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from baton.kv.pages.tables import parts_of
from baton.protos.channel import ShipBlock
from baton.protos.nouns import KvLayout


class TableBlock(msgspec.Struct, frozen=True):
    """Represents a receiver's block by the sender's pages that it is made of: one, of which it is ``table``'s part,
    or one of each of the sender's tables.
    """

    index: int  # of the block in what the receiver takes
    pages: tuple[int, ...]
    table: int = 0


class Retabling:
    """Maps the sender's blocks of a prompt of ``tokens`` tokens, as they are finished, to the receiver's blocks.

    The receiver already has its first ``held`` blocks and those of index ``received``.
    """

    def __init__(
        self, sender: KvLayout, receiver: KvLayout, tokens: int, held: int = 0, received: Collection[int] = ()
    ) -> None:
        size = receiver.block_tokens
        self._blocks = -(-tokens // size)
        self._tables = len(sender.windows)  # 0: the receiver has them
        self._parts = parts_of(receiver.windows, tokens, size)
        self.blocks = self._blocks + sum(self._blocks - part.first for part in self._parts)
        self.tail_tokens = tokens - (self._blocks - 1) * size
        self._lacking = set(range(held, self.blocks)) - set(received)
        self._pages: dict[int, dict[int, int]] = {}  # by block, its pages that came, by table

    def wanted(self) -> tuple[int, tuple[int, ...]]:
        """Returns which of its blocks the sender need not announce: how many leading ones, and the indices of
        further ones.
        """
        had = [block for block in range(self._blocks) if not any(i in self._lacking for i, _ in self._of(block))]
        ours = [table * self._blocks + block for table in range(max(1, self._tables)) for block in had]
        leading = next((n for n, block in enumerate(had) if n != block), len(had))
        return leading, tuple(ours[leading:])

    def take(self, block: ShipBlock) -> list[TableBlock]:
        """Adds a block that the sender finished. Returns the receiver's blocks that it completes."""
        if not self._tables:
            return [TableBlock(i, (block.page,), table) for i, table in self._of(block.index) if self._first(i)]
        table, index = divmod(block.index, self._blocks)
        pages = self._pages.setdefault(index, {})
        pages[table] = block.page
        if len(pages) < self._tables:
            return []
        del self._pages[index]
        return [TableBlock(index, tuple(pages[each] for each in range(self._tables)))] if self._first(index) else []

    def _first(self, index: int) -> bool:
        """Returns whether the receiver lacks block ``index``, and counts it as sent."""
        if index not in self._lacking:
            return False
        self._lacking.discard(index)
        return True

    def _of(self, block: int) -> Iterator[tuple[int, int]]:
        """Yields the receiver's blocks that have a part of the prompt's ``block``, and their tables."""
        yield block, 0
        for part in self._parts:
            if block >= part.first:
                yield part.at + block - part.first, part.number
