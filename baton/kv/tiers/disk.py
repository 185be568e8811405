"""Implements the disk tier: a slab in two files, reused by the next process of the same worker slot.

Knows nothing of pages' contents. ``pages.kv`` holds the pages, ``index.kv`` a header and the records. The header
identifies what the bytes depend on (page size, layout, weights); files with another header are emptied, because
this is a cache. The kernel writes back when it wants: a crash of the *machine* may leave damage, which the
checksums detect.

The files are read and written, never mapped: a disk error under a mapping is SIGBUS, which would end the worker.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from baton.kv.tiers.slab import RECORD_BYTES, Eviction, Slab
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout

log = logging.getLogger("baton.kv")
MAGIC = b"baton.kv.tier.1\x00"
HEADER_BYTES = 4096  # bytes of the file's header, a whole page


class DiskTier:
    """Owns the two files in ``folder``, locked, until ``close``; ``slab`` stores pages in them.

    ``capacity_bytes`` of disk are reserved at once. If the disk is full, files beside ``folder`` that no process
    has are emptied: those of slots whose workers are elsewhere now. Raises ConfigError if not one page fits,
    another process has the files, or they can't be written.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, layout: KvLayout, fingerprint: str, eviction: Eviction = "worth"
    ) -> None:
        slots = (capacity_bytes - HEADER_BYTES) // (layout.page_bytes + RECORD_BYTES)
        if slots < 1:
            raise ConfigError(
                f"{capacity_bytes} bytes don't hold one page of {layout.page_bytes}; raise worker.disk_tier_bytes",
                "worker.disk_tier_bytes",
            )
        self._index, self._pages = _files(folder)
        header = MAGIC + _meaning(slots, layout, fingerprint)
        try:
            _require_lock(self._index, folder)
            if os.pread(self._index.fileno(), len(header), 0) != header:
                _begin(self._index, self._pages, header)
            sizes = (self._index, HEADER_BYTES + slots * RECORD_BYTES), (self._pages, slots * layout.page_bytes)
            try:
                _reserve(*sizes)
            except OSError as error:
                if error.errno != errno.ENOSPC or not _others_emptied(folder):
                    raise
                _reserve(*sizes)
            store = FileStore(self._index.fileno(), self._pages.fileno(), slots, layout.page_bytes)
            self.slab = Slab(store, eviction)
        except OSError as error:
            self._close_files()
            raise ConfigError(f"{folder}: {error.strerror}; set another worker.disk_tier_dir", _DIR) from None

    def close(self) -> None:
        """Unlocks and closes the files, which no thread may be reading or writing any more."""
        fcntl.flock(self._index, fcntl.LOCK_UN)
        self._close_files()

    def _close_files(self) -> None:
        self._index.close()
        self._pages.close()


class FileStore:
    """Implements ``Store`` on two open files, given by descriptor.

    Pages pass through a buffer of the store, so that no other memory is in use while the disk is slow.
    """

    def __init__(self, index: int, pages: int, slots: int, page_bytes: int) -> None:
        self.slots = slots
        self._index, self._pages, self._page_bytes = index, pages, page_bytes
        self._passing = memoryview(mmap.mmap(-1, page_bytes))

    def view(self, slot: int) -> memoryview:
        """Returns the buffer through which every page passes, whatever the ``slot``."""
        return self._passing

    def fetch(self, slot: int) -> None:
        """Reads the page of ``slot`` into the buffer. Raises OSError, also if the file is too short."""
        if os.preadv(self._pages, [self._passing], slot * self._page_bytes) != self._page_bytes:
            raise OSError(errno.EIO, "the file of pages was cut short")

    def flush(self, slot: int) -> None:
        """Writes the buffer as the page of ``slot``. Raises OSError, also if only a part could be written."""
        if os.pwrite(self._pages, self._passing, slot * self._page_bytes) != self._page_bytes:
            raise OSError(errno.ENOSPC, "a page was written in part")

    def record(self, slot: int, data: bytes) -> None:
        """Writes the record of ``slot``. Raises OSError."""
        if os.pwrite(self._index, data, HEADER_BYTES + slot * RECORD_BYTES) != len(data):
            raise OSError(errno.ENOSPC, "a record was written in part")

    def records(self) -> bytes:
        """Returns all records; those that the file lacks are zeros. Raises OSError."""
        size, found = self.slots * RECORD_BYTES, bytearray()
        while part := os.pread(self._index, size - len(found), HEADER_BYTES + len(found)):
            found += part
        return bytes(found.ljust(size, b"\0"))


_DIR = "worker.disk_tier_dir"


def _files(folder: Path) -> tuple[BinaryIO, BinaryIO]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        first, second = (os.open(folder / n, os.O_RDWR | os.O_CREAT, 0o600) for n in ("index.kv", "pages.kv"))
    except OSError as error:
        text = f"{folder} can't be written ({error.strerror}); set another worker.disk_tier_dir"
        raise ConfigError(text, _DIR) from None
    return os.fdopen(first, "r+b"), os.fdopen(second, "r+b")


def _require_lock(file: BinaryIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        text = f"{folder} is another worker's; give each cluster on this machine its own worker.disk_tier_dir"
        raise ConfigError(text, _DIR) from None


def _meaning(slots: int, layout: KvLayout, fingerprint: str) -> bytes:
    """Returns a digest of what must be the same for the files to be reused."""
    return hashlib.sha256(msgspec.json.encode((slots, msgspec.to_builtins(layout), fingerprint))).digest()


def _begin(index: BinaryIO, pages: BinaryIO, header: bytes) -> None:
    """Empties both files and writes the header."""
    for file in (index, pages):
        os.ftruncate(file.fileno(), 0)
    os.ftruncate(index.fileno(), HEADER_BYTES)
    os.pwrite(index.fileno(), header, 0)


def _reserve(*sizes: tuple[BinaryIO, int]) -> None:
    """Allocates the disk space of files now, so that a disk that is too small is an error at the start."""
    for file, size in sizes:
        os.posix_fallocate(file.fileno(), 0, size)


def _others_emptied(folder: Path) -> bool:
    """Empties the tiers beside ``folder`` that no process has; returns whether there was one."""
    emptied = False
    for index in folder.parent.glob("*/index.kv"):
        if index.parent != folder:
            with suppress(OSError), index.open("r+b") as file:  # OSError: a worker has it, or it isn't ours
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if file.read(len(MAGIC)) != MAGIC:
                    continue
                os.truncate(index.with_name("pages.kv"), 0)
                os.ftruncate(file.fileno(), 0)
                log.warning("the disk is full: %s, which no worker has, is emptied", index.parent)
                emptied = True
    return emptied
