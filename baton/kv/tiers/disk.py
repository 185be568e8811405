"""Keeps a tier on disk: a slab in two files, found again by the next process of the same slot.

Knows nothing of what is in it. ``pages.kv`` holds the pages, ``index.kv`` a header and the records. The header
names what the bytes depend on (page size, layout, weights); files that say otherwise are begun anew, because this
is a cache. The kernel writes back in its own time: a crash of the *machine* may leave damage, which the checksums
catch.

The files are read and written, never mapped: a disk that fails under a mapping is SIGBUS, the worker's end.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from baton.kv.tiers.slab import RECORD_BYTES, Eviction, Slab
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout

MAGIC = b"baton.kv.tier.1\x00"
HEADER_BYTES = 4096


class DiskTier:
    """Owns the two files in ``folder``, locked, until ``close``. Raises ConfigError naming the setting."""

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
            _reserve(self._index, HEADER_BYTES + slots * RECORD_BYTES)
            _reserve(self._pages, slots * layout.page_bytes)
            store = FileStore(self._index.fileno(), self._pages.fileno(), slots, layout.page_bytes)
            self.slab = Slab(store, eviction)
        except OSError as error:
            self._close_files()
            raise ConfigError(f"{folder}: {error.strerror}; set another worker.disk_tier_dir", _DIR) from None

    def close(self) -> None:
        """Lets go of the files, which no thread may be reading or writing any more."""
        fcntl.flock(self._index, fcntl.LOCK_UN)
        self._close_files()

    def _close_files(self) -> None:
        self._index.close()
        self._pages.close()


class FileStore:
    """Implements ``Store`` on two open files.

    Pages pass through memory of the store's own, so that nobody else's memory waits for a disk.
    """

    def __init__(self, index: int, pages: int, slots: int, page_bytes: int) -> None:
        self.slots = slots
        self._index, self._pages, self._page_bytes = index, pages, page_bytes
        self._passing = memoryview(mmap.mmap(-1, page_bytes))

    def view(self, slot: int) -> memoryview:
        """Returns the memory through which every page passes."""
        return self._passing

    def fetch(self, slot: int) -> None:
        """Reads the page of ``slot``. Raises OSError, also where the file is too short."""
        if os.preadv(self._pages, [self._passing], slot * self._page_bytes) != self._page_bytes:
            raise OSError(errno.EIO, "the file of pages was cut short")

    def flush(self, slot: int) -> None:
        """Writes the page of ``slot``. Raises OSError, also where only a part could be written."""
        if os.pwrite(self._pages, self._passing, slot * self._page_bytes) != self._page_bytes:
            raise OSError(errno.ENOSPC, "a page was written in part")

    def record(self, slot: int, data: bytes) -> None:
        """Writes the record of ``slot``. Raises OSError."""
        if os.pwrite(self._index, data, HEADER_BYTES + slot * RECORD_BYTES) != len(data):
            raise OSError(errno.ENOSPC, "a record was written in part")

    def records(self) -> bytes:
        """Returns all records; what the file lacks is blank. Raises OSError."""
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
    """A digest of what must be the same for the files to be of use."""
    return hashlib.sha256(msgspec.json.encode((slots, msgspec.to_builtins(layout), fingerprint))).digest()


def _begin(index: BinaryIO, pages: BinaryIO, header: bytes) -> None:
    """Empty files; the header comes last."""
    for file in (index, pages):
        os.ftruncate(file.fileno(), 0)
    os.ftruncate(index.fileno(), HEADER_BYTES)
    os.pwrite(index.fileno(), header, 0)


def _reserve(file: BinaryIO, size: int) -> None:
    """Take the space now: that a disk is too small is said at the start."""
    os.posix_fallocate(file.fileno(), 0, size)
