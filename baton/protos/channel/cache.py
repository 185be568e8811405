"""Cached blocks that others read, copy or bring: pins, keeps and fills, and what became findable or idle."""

from __future__ import annotations

from baton.protos.channel.message import Message


class Pin(Message):
    """Asks to pin the leading blocks of ``hashes`` that are cached, for a Fetch; answered by Pinned."""

    key: int
    hashes: tuple[bytes, ...]


class Unpin(Message):
    """Ends the pin ``key``: the I/O process reads its pages no more."""

    key: int


class Keep(Message):
    """Asks to evict none of ``hashes`` that are still cached until Unkeep; answered by Kept."""

    key: int
    hashes: tuple[bytes, ...]


class Unkeep(Message):
    """Ends the keep ``key``: its blocks were copied and may be evicted."""

    key: int


class Fill(Message):
    """Asks for pages for the leading blocks ``hashes``, whose bytes come from elsewhere; answered by Filling."""

    key: int
    hashes: tuple[bytes, ...]


class Filled(Message):
    """Reports that the first ``blocks`` of a Fill are written and verified; the other pages go back to the pool."""

    key: int
    blocks: int


class Pinned(Message):
    """Answers Pin with the pages of the leading blocks that are cached here; they are pinned until Unpin."""

    key: int
    pages: tuple[int, ...]


class Kept(Message):
    """Answers Keep: which of the blocks are here, and in which pages."""

    key: int
    hashes: tuple[bytes, ...]
    pages: tuple[int, ...]


class Filling(Message):
    """Answers Fill: block i goes to ``pages[i]``, and the first ``held`` are here already. No pages mean no room.

    Only the I/O process touches the pages from ``held`` on, until it sends Filled.
    """

    key: int
    held: int
    pages: tuple[int, ...]


class CacheChanged(Message):
    """Reports full blocks that became findable in this worker's cache, and those that are gone."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class CacheIdle(Message):
    """Reports blocks that nobody leases any more, a chain's tail first; sent only where there are lower tiers."""

    hashes: tuple[bytes, ...]
