"""The hit rate of a perfect prefix cache, one that never forgets and that all workers share, to compare the real
one with.

Knows nothing of workers. Blocks are remembered in two generations of ``kept`` each, so that memory is bounded: 16
tokens cost some 18 bytes.
"""

from __future__ import annotations

from baton.cluster.prefix_index import HASH_BYTES
from baton.protos.nouns import BLOCK_TOKENS

KEPT_BLOCKS = 400_000  # blocks of a generation, of which there are two


class UnboundedCache:
    """Remembers the block hashes of every prompt so far, in two generations of ``kept`` blocks.

    Prompts of other router processes are not seen: with several of them the hit rate is a lower bound.
    """

    def __init__(self, kept: int = KEPT_BLOCKS) -> None:
        self._kept = kept
        self._young, self._old = _Chains(), _Chains()

    def seen(self, chain: bytes) -> int:
        """Returns how many leading blocks of ``chain`` (block hashes, concatenated) were seen before, and remembers
        all of them.
        """
        found = max(self._old.known(chain), self._young.add(chain))
        if self._young.blocks >= self._kept:
            self._old, self._young = self._young, _Chains()
        return found // HASH_BYTES

    def could_reuse(self, chain: bytes, prompt_tokens: int) -> int:
        """Returns how many of ``prompt_tokens`` an endless cache would have had, all but one at most; remembers
        ``chain``, the prompt's block hashes.
        """
        return max(0, min(self.seen(chain) * BLOCK_TOKENS, prompt_tokens - 1))

    def __len__(self) -> int:
        return self._young.blocks + self._old.blocks


class _Fork:
    """``blocks`` in a row, after which chains part: what follows, by its first block."""

    __slots__ = ("after", "blocks")

    def __init__(self, blocks: bytes, after: dict[bytes, bytes | _Fork]) -> None:
        self.blocks, self.after = blocks, after


class _Chains:
    """Stores chains of block hashes in a radix tree. A chain is its blocks' hashes in a row; where no two part,
    that is all there is of it: a prompt that shares nothing is one ``bytes`` in a dict, which no garbage collection
    walks.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._heads: dict[bytes, bytes | _Fork] = {}

    def known(self, chain: bytes) -> int:
        """Leading bytes of ``chain`` that are in it."""
        return self._follow(chain)[0]

    def add(self, chain: bytes) -> int:
        """The same; then all of it is in."""
        at, branches, same = self._follow(chain)
        rest = chain[at:]
        if rest:
            first = chain[at - same : at - same + HASH_BYTES]
            branches[first] = _joined(branches[first], same, rest) if same else rest
            self.blocks += len(rest) // HASH_BYTES
        return at

    def _follow(self, chain: bytes) -> tuple[int, dict[bytes, bytes | _Fork], int]:
        """Follows ``chain`` as far as it is known: returns the bytes, the branches last looked at, and how much of
        one of them is in it.
        """
        at, branches = 0, self._heads
        while True:
            found = branches.get(chain[at : at + HASH_BYTES])
            if found is None:
                return at, branches, 0
            blocks = found if isinstance(found, bytes) else found.blocks
            same = _same(blocks, chain, at)
            at += same
            if at == len(chain) or same < len(blocks) or isinstance(found, bytes):
                return at, branches, same
            branches = found.after


def _same(blocks: bytes, chain: bytes, at: int) -> int:
    """Bytes that ``blocks`` and what follows ``at`` begin with alike; the first block is.

    A block's hash is that of all before it, too: where one is the same, those before it are.
    """
    if chain.startswith(blocks, at):
        return len(blocks)
    low, high = 1, min(len(blocks), len(chain) - at) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES
        if chain.startswith(blocks[end - HASH_BYTES : end], at + end - HASH_BYTES):
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES


def _joined(branch: bytes | _Fork, same: int, rest: bytes) -> bytes | _Fork:
    """A branch whose first ``same`` bytes ``rest`` may follow, too."""
    if isinstance(branch, bytes):
        if same == len(branch):
            return branch + rest  # a conversation goes on
        return _Fork(branch[:same], {branch[same : same + HASH_BYTES]: branch[same:], rest[:HASH_BYTES]: rest})
    behind = _Fork(branch.blocks[same:], branch.after)
    return _Fork(branch.blocks[:same], {behind.blocks[:HASH_BYTES]: behind, rest[:HASH_BYTES]: rest})
