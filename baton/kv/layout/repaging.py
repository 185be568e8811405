"""Maps blocks of one size to blocks of another: of which runs of 16 tokens, in which pages, each consists.

Knows nothing of bytes or of hashes: each side's hash chain has its own block size. Any two multiples of 16 can be
mapped, because a page is a sequence of runs of 16 tokens (page.py):

    16 -> 48    sender's blocks    0 1 2|3 4 5|6         32 -> 16    sender's blocks    0     |1     |2 (tail)
                receiver's blocks  0    |1    |2 (tail)              receiver's blocks  0 |1  |2 |3  |4
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from baton.protos.channel import ShipBlock
from baton.protos.nouns import BLOCK_TOKENS, KvLayout


class ReceiverBlock(msgspec.Struct, frozen=True):
    """Represents a receiver's block by the sender's runs of 16 tokens that it consists of; the last block may have
    fewer.
    """

    index: int  # of the block in the receiver's prompt
    runs: tuple[tuple[int, int], ...]  # (the sender's page, index of the run in it) of each


class Repaging:
    """Maps the sender's blocks of a prompt of ``tokens`` tokens, as they are finished, to the receiver's blocks.

    The receiver already has its first ``held`` blocks and those of index ``received``.
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
        """Returns which of its blocks the sender need not announce: how many leading ones, and the indices of
        further ones.
        """
        ours = range(-(-self._runs // self._ours))
        had = [block for block in ours if self._lacking.isdisjoint(self._parts_of(block))]
        leading = next((n for n, block in enumerate(had) if n != block), len(had))
        return leading, tuple(had[leading:])

    def take(self, block: ShipBlock) -> list[ReceiverBlock]:
        """Adds a block that the sender finished. Returns the receiver's blocks that it completes."""
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
        """Returns the runs of the receiver's block ``index``."""
        return range(index * self._theirs, min((index + 1) * self._theirs, self._runs))

    def _sources_of(self, index: int) -> range:
        """Returns the sender's blocks of which the receiver's block ``index`` consists."""
        runs = self._runs_of(index)
        return range(runs[0] // self._ours, runs[-1] // self._ours + 1)

    def _parts_of(self, block: int) -> range:
        """Returns the receiver's blocks that contain a part of the sender's ``block``."""
        last = min((block + 1) * self._ours, self._runs) - 1
        return range(block * self._ours // self._theirs, last // self._theirs + 1)
