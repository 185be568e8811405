"""Channel messages about cached KV blocks: pins for readers, keeps for copies, fills from elsewhere, and changes of
the cache.

Hashes are chain hashes of blocks; ``key`` pairs question and answer.
"""

from __future__ import annotations

from baton.protos.channel.message import Message


class Pin(Message):
    """Asks to pin the leading blocks of ``hashes`` that are cached, so that another worker can fetch them; answered
    by Pinned. ``lasts``: they are pinned for as long as a client wants, not while they are read.
    """

    key: int
    hashes: tuple[bytes, ...]
    lasts: bool = False


class Unpin(Message):
    """Ends the pin ``key``, because the I/O process has stopped reading its pages."""

    key: int


class Keep(Message):
    """Asks not to evict those of ``hashes`` that are cached, until Unkeep; answered by KeepAnswer."""

    key: int
    hashes: tuple[bytes, ...]


class Unkeep(Message):
    """Ends the keep ``key``, because its blocks were copied."""

    key: int


class Fill(Message):
    """Asks for pages for the leading blocks ``hashes``, which the I/O process is to write; answered by Filling."""

    key: int
    hashes: tuple[bytes, ...]


class Filled(Message):
    """Reports that the first ``blocks`` blocks of a Fill are written and verified; the other pages return to the
    pool.
    """

    key: int
    blocks: int


class Pinned(Message):
    """Answers Pin with the pages of the leading blocks that are cached here; they are pinned until Unpin."""

    key: int
    pages: tuple[int, ...]


class KeepAnswer(Message):
    """Answers Keep with those of the blocks that are cached, and their pages."""

    key: int
    hashes: tuple[bytes, ...]
    pages: tuple[int, ...]


class Filling(Message):
    """Answers Fill: block i goes to ``pages[i]``, and the first ``held`` are cached already. No pages: there is no
    room.

    Only the I/O process touches the pages from ``held`` on, until it sends Filled.
    """

    key: int
    held: int
    pages: tuple[int, ...]


class CacheChanged(Message):
    """Reports the hashes of full blocks that entered this worker's prefix cache, and of those that left it."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class CacheIdle(Message):
    """Reports cached blocks that no lease uses any more, the last block of a chain first; sent only if there are
    lower tiers.
    """

    hashes: tuple[bytes, ...]
