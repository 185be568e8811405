"""Maps blocks of one size to blocks of another: which runs of 16 tokens, of which pages, make up a receiver's
block.

Knows nothing of bytes or of hashes: each side's chain is of its own block size. Any two multiples of 16 go, because
a page is runs of 16 tokens in a row (page.py):

    16 -> 48    sender's blocks    0 1 2|3 4 5|6         32 -> 16    sender's blocks    0     |1     |2 (tail)
                receiver's blocks  0    |1    |2 (tail)              receiver's blocks  0 |1  |2 |3  |4
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from baton.protos.channel import ShipBlock
from baton.protos.nouns import BLOCK_TOKENS, KvLayout


class ReceiverBlock(msgspec.Struct, frozen=True):
    """Names a receiver's block ``index`` by its runs, (sender's page, run in that page) each; a tail may have
    fewer.
    """

    index: int
    runs: tuple[tuple[int, int], ...]


class Repaging:
    """Follows the blocks of one prompt of ``tokens`` tokens as the sender finishes them.

    ``held`` and ``received`` say what the receiver has, in its own blocks.
    """

    def __init__(
        self, sender: KvLayout, receiver: KvLayout, tokens: int, held: int = 0, received: Collection[int] = ()
    ) -> None:
        self._ours, self._theirs = sender.runs, receiver.runs
        self._runs = -(-tokens // BLOCK_TOKENS)
        self.blocks = -(-self._runs // self._theirs)
        self.tail_tokens = tokens - (self.blocks - 1) * receiver.block_tokens
        self._lacking = set(range(held, self.blocks)) - set(received)
        self._pages: dict[int, int] = {}  # of our blocks that came, while a block of the receiver's needs them

    def wanted(self) -> tuple[int, tuple[int, ...]]:
        """Returns what the sender need not announce, in its own blocks: how many leading ones, and which ones after
        them.
        """
        ours = range(-(-self._runs // self._ours))
        had = [block for block in ours if self._lacking.isdisjoint(self._parts_of(block))]
        leading = next((n for n, block in enumerate(had) if n != block), len(had))
        return leading, tuple(had[leading:])

    def take(self, block: ShipBlock) -> list[ReceiverBlock]:
        """Takes a finished block of the sender's. Returns the receiver's blocks that are whole by it."""
        self._pages[block.index] = block.page
        whole = []
        for index in self._parts_of(block.index):
            sources = self._sources_of(index)
            if index in self._lacking and all(source in self._pages for source in sources):
                whole.append(ReceiverBlock(index, tuple(self._place(run) for run in self._runs_of(index))))
                self._lacking.discard(index)
        for source in {source for piece in whole for source in self._sources_of(piece.index)}:
            if self._lacking.isdisjoint(self._parts_of(source)):
                del self._pages[source]
        return whole

    def _place(self, run: int) -> tuple[int, int]:
        block, within = divmod(run, self._ours)
        return self._pages[block], within

    def _runs_of(self, index: int) -> range:
        """A receiver's block, in runs."""
        return range(index * self._theirs, min((index + 1) * self._theirs, self._runs))

    def _sources_of(self, index: int) -> range:
        """The sender's blocks that a receiver's block is made of."""
        runs = self._runs_of(index)
        return range(runs[0] // self._ours, runs[-1] // self._ours + 1)

    def _parts_of(self, block: int) -> range:
        """The receiver's blocks that take something of a sender's."""
        last = min((block + 1) * self._ours, self._runs) - 1
        return range(block * self._ours // self._theirs, last // self._theirs + 1)
