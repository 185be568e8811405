"""Leases the pages of a sequence whose blocks have several: one that all later tokens read, and further ones for
layers with a window. Torch-free.

Knows nothing of layers or of bytes. Each page of a block belongs to a table of its own, and the tables are leased,
extended and closed together. Pages of a further table are given back when its window has passed them. They stay
cached until they are evicted, as all sealed pages do, by

    SHA-256("baton.table.v1" NUL, the 32 bytes of the block's hash, u32 number of the table)       little-endian

A prefix is found where the first table has all of its blocks, and each further table those that the next token
sees. A handoff brings these as blocks that follow the prompt's own, table by table.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from hashlib import sha256
from itertools import compress, islice
from operator import not_
from typing import NamedTuple

from baton.kv.pages.lease import LeasedPool, PageLease
from baton.kv.pages.pool import PagePool
from baton.kv.pages.window import first_seen, growth

_DOMAIN = b"baton.table.v1\x00"


def table_hash(block: bytes, number: int) -> bytes:
    """Returns the hash of the page that the block of hash ``block`` has in table ``number``, from 1."""
    return sha256(_DOMAIN + block + struct.pack("<I", number)).digest()


def deepest(known: Container[bytes], hashes: Sequence[bytes], windows: Sequence[int], block_tokens: int) -> int:
    """Returns the length of the longest prefix of ``hashes`` that can be continued from the blocks in ``known``.

    ``windows`` are the tables' windows in tokens, the first of them 0.
    """
    end = next(compress(range(len(hashes)), map(not_, map(known.__contains__, hashes))), len(hashes))
    while end:
        lacking = [_last_lacking(known, hashes, number, end, windows, block_tokens) for number in _further(windows)]
        if max(lacking, default=-1) < 0:
            return end
        end = max(lacking)  # every longer prefix sees that block, too
    return 0


def seen_behind(hashes: Sequence[bytes], windows: Sequence[int], block_tokens: int) -> list[bytes]:
    """Returns the hashes of the pages in further tables that the token after the blocks ``hashes`` sees."""
    end = len(hashes)
    firsts = [first_seen(end * block_tokens, window, block_tokens) for window in windows]
    return [table_hash(block, number) for number in _further(windows) for block in hashes[firsts[number] :]]


def _further(windows: Sequence[int]) -> range:
    return range(1, len(windows))


def _last_lacking(
    known: Container[bytes],
    hashes: Sequence[bytes],
    number: int,
    end: int,
    windows: Sequence[int],
    block_tokens: int,
) -> int:
    """Returns the last block before ``end`` that table ``number`` needs and ``known`` lacks; -1 for none."""
    first = first_seen(end * block_tokens, windows[number], block_tokens)
    lacking = (at for at in reversed(range(first, end)) if table_hash(hashes[at], number) not in known)
    return next(lacking, -1)


class TablePart(NamedTuple):
    """Says which blocks of a further table a handoff brings: those from ``first`` on, as its blocks from ``at``
    on.
    """

    number: int  # of the table
    first: int
    at: int


def parts_of(windows: Sequence[int], tokens: int, block_tokens: int) -> list[TablePart]:
    """Returns what a handoff of a prompt of ``tokens`` tokens brings of each further table."""
    blocks = -(-tokens // block_tokens)
    found, at = list[TablePart](), blocks
    for number in _further(windows):
        first = min(first_seen(tokens, windows[number], block_tokens), blocks - 1)
        found.append(TablePart(number, first, at))
        at += blocks - first
    return found


def count_of(windows: Sequence[int], tokens: int, block_tokens: int) -> int:
    """Returns how many blocks of further tables a handoff of a prompt of ``tokens`` tokens brings."""
    blocks = -(-tokens // block_tokens)
    return sum(blocks - part.first for part in parts_of(windows, tokens, block_tokens))


def hashes_behind(hashes: Sequence[bytes], windows: Sequence[int], tokens: int, block_tokens: int) -> list[bytes]:
    """Returns the hashes of the blocks of further tables that a handoff of a prompt of ``tokens`` tokens brings;
    its blocks have ``hashes``.
    """
    parts = parts_of(windows, tokens, block_tokens)
    return [table_hash(block, part.number) for part in parts for block in hashes[part.first :]]


class TablesLease(PageLease):
    """Owns the pages of one request in several tables. It is itself the first table's lease; ``further`` are the
    others, whose gaps are the blocks that their windows have passed. They may end before the first one.
    """

    def __init__(self, pool: LeasedPool, pages: list[int], held: int, further: Sequence[PageLease]) -> None:
        super().__init__(pool, pages, held)
        self.further = tuple(further)

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Returns the further tables, each with a page for every block, as ``pages``."""
        return tuple([lease.pages for lease in self.further])

    @property
    def blocks(self) -> int:
        """Returns the number of leading blocks that have a page in the first table, and in others unless it was
        given back.
        """
        return min(len(self.pages), *(len(lease.pages) for lease in self.further))

    @property
    def landing(self) -> list[int]:
        """Returns the pages that a handoff may write: the first table's, then those that each further one has."""
        return [*self.pages, *(page for lease in self.further for page in lease.pages[lease.gap[1] :])]

    def landing_hashes(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns the hashes of ``landing`` after the first table's, whose blocks have ``hashes``."""
        tables = enumerate(self.further, 1)
        return [table_hash(block, number) for number, lease in tables for block in hashes[lease.gap[1] :]]

    def slide(self, tokens: int, shipped_from: int | None = None) -> None:
        """Gives back the pages of further tables that no token from position ``tokens`` on reads.

        A receiver wants none of those, so ``shipped_from`` only says that a handoff's reader doesn't forbid it.
        """
        for lease in self.further:
            lease.hinted_blocks = self.hinted_blocks
            lease.slide(tokens, None if shipped_from is None else len(lease.pages) - 1)

    def extend(self, blocks: int, reserve: int = 0) -> None:
        """Adds ``blocks`` pages at the end of the first table, and as many to the others as they lack then, leaving
        ``reserve`` available to others. Raises PoolExhausted with nothing changed.
        """
        self.reach(len(self.pages) + blocks, reserve)

    def reach(self, blocks: int, reserve: int = 0) -> None:
        """Adds pages at the end of every table until it has ``blocks`` blocks, leaving ``reserve`` available to
        others. Raises PoolExhausted with nothing changed.
        """
        assert not self.closed, "a closed lease can't grow"
        tables = [lease.pages for lease in (self, *self.further)]
        short = [max(0, blocks - len(table)) for table in tables]
        if not any(short):
            return
        found = iter(self._pool.allocate(sum(short), reserve))
        for table, count in zip(tables, short, strict=True):
            table.extend(islice(found, count))

    def growth(self, blocks: int, most: Sequence[int]) -> int:
        """Returns how many pages more than now the further tables may have at once until the lease has ``blocks``
        blocks, if each table has at most its number of ``most`` at once.
        """
        tables = zip(self.further, most, strict=True)
        return sum(growth(len(t.pages), t.gap[1], blocks, pages, t.shared) for t, pages in tables)

    def branch(self, blocks: int, reserve: int = 0) -> list[int]:
        """Raises AssertionError, because no runner reads branches in several tables."""
        raise AssertionError("branches have one table")

    def shrink(self, blocks: int) -> None:
        """Gives back the pages of every table after the first ``blocks``, none of which may be sealed."""
        super().shrink(blocks)
        for lease in self.further:
            lease.shrink(blocks)

    def seal(self, index: int, block: bytes) -> bool:
        """Makes block ``index`` findable by hash ``block``, with its pages in all tables. Returns False if another
        page than the first table's is found by it.
        """
        for number, lease in enumerate(self.further, 1):
            lease.seal_run(index, [table_hash(block, number)])
        return super().seal(index, block)

    def seal_run(self, first: int, blocks: Sequence[bytes]) -> None:
        """Makes consecutive blocks from index ``first`` on findable by the hashes ``blocks``, with their pages in
        all tables.
        """
        super().seal_run(first, blocks)
        for number, lease in enumerate(self.further, 1):
            lease.seal_run(first, [table_hash(block, number) for block in blocks])

    def hold(self) -> None:
        """Records that another process reads or writes pages of any table until ``release``."""
        super().hold()
        for lease in self.further:
            lease.hold()

    def release(self) -> None:
        """Ends one ``hold`` of all tables' pages."""
        super().release()
        for lease in self.further:
            lease.release()

    def close(self) -> None:
        """Gives the pages of all tables back to the pool. A second call does nothing."""
        for lease in self.further:
            lease.hinted_blocks = self.hinted_blocks
            lease.close()
        super().close()


def open_tables(
    pool: PagePool,
    hashes: Sequence[bytes],
    windows: Sequence[int],
    blocks: int,
    reserve: int = 0,
    limit_held: int = 0,
    grows: bool = False,
    most: Sequence[int] = (),
) -> TablesLease:
    """Leases pages for ``blocks`` blocks in tables of ``windows`` (tokens, the first 0).

    The first ``held`` blocks, ``limit_held`` at most, are cached ones of ``hashes``; in further tables only those
    have pages that the next token sees. If it ``grows``, those have no page yet after the next token's block.
    ``most``, if given, is the number of pages that each further table may have at once while it grows; these stay
    available now. ``reserve`` pages more stay available to others. Raises PoolExhausted.
    """
    size = pool.block_tokens
    held = deepest(pool.blocks.page_of, hashes[: min(blocks, limit_held)], windows, size)
    firsts = [min(first_seen(held * size, window, size), blocks - 1) for window in windows[1:]]
    named = [[table_hash(block, number) for block in hashes[at:held]] for number, at in enumerate(firsts, 1)]
    end = min(blocks, held + 1) if grows else blocks
    if most:
        tables = zip(firsts, most, map(pool.shared, named), strict=True)
        reserve += sum(growth(end, first, blocks, pages, shared) for first, pages, shared in tables)
    return _opened(pool, [hashes[:held], *named], [0, *firsts], windows, (blocks, end), reserve)


def open_tables_behind(
    pool: PagePool,
    hashes: Sequence[bytes],
    windows: Sequence[int],
    tokens: int,
    reserve: int = 0,
    limit_held: int = 0,
) -> TablesLease:
    """Leases pages for a prompt of ``tokens`` tokens in tables of ``windows``, which a handoff fills: in further
    tables only those that the next token sees.

    Only the first table's leading blocks, ``limit_held`` at most, are cached ones of ``hashes``. ``reserve`` pages
    stay available to others. Raises PoolExhausted.
    """
    held, blocks = pool.match(hashes[:limit_held]), -(-tokens // pool.block_tokens)
    firsts = [part.first for part in parts_of(windows, tokens, pool.block_tokens)]
    return _opened(pool, [hashes[:held], *([] for _ in firsts)], [0, *firsts], windows, (blocks, blocks), reserve)


def _opened(
    pool: PagePool,
    cached: Sequence[Sequence[bytes]],
    firsts: Sequence[int],
    windows: Sequence[int],
    blocks: tuple[int, int],
    reserve: int,
) -> TablesLease:
    """Leases, in each table, the pages of the blocks from its entry of ``firsts`` on, which begin with those of its
    entry of ``cached``. ``blocks`` are the numbers of blocks of the first table, and of the others.
    """
    held, wanted = len(cached[0]), [blocks[0], *(blocks[1] - first for first in firsts[1:])]
    found = iter(pool.acquire([block for names in cached for block in names], sum(wanted), reserve))
    begins = [list(islice(found, len(names))) for names in cached]
    tables = [[*begin, *islice(found, count - len(begin))] for begin, count in zip(begins, wanted, strict=True)]
    spans = zip(tables[1:], firsts[1:], windows[1:], strict=True)
    further = [PageLease(pool, pages, held, (0, first), window) for pages, first, window in spans]
    lease = TablesLease(pool, tables[0], held, further)
    pool.open_leases.update((lease, *further))
    return lease
