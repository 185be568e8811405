"""Pages in shared memory: a memfd that the engine makes and hands to the I/O process.

Knows nothing of what the bytes mean or who owns which page. A memfd needs no /dev/shm, so a container's
limit on that doesn't matter; it is sealed against resizing, so no peer can make a mapped page vanish.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from baton.protos.errors import ConfigError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PageMemory:
    """``pages`` pages of ``page_bytes`` bytes each, mapped read-write and shared. Owns ``fd``."""

    def __init__(self, fd: int, pages: int, page_bytes: int) -> None:
        self.fd = fd
        self.pages = pages
        self.page_bytes = page_bytes
        self._map = mmap.mmap(fd, pages * page_bytes, mmap.MAP_SHARED)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, pages: int, page_bytes: int) -> PageMemory:
        """New zeroed pages; physical memory is taken as they are touched."""
        if pages < 1 or page_bytes < 1:
            raise ConfigError(f"at least one page of one byte is needed, not {pages} of {page_bytes}", "pages")
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, pages * page_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, pages, page_bytes)

    @classmethod
    def attach(cls, fd: int, pages: int, page_bytes: int) -> PageMemory:
        """Map pages that another process made; takes ``fd`` over."""
        size = os.fstat(fd).st_size
        if size != pages * page_bytes:
            raise ConfigError(f"the KV memory has {size} bytes, not {pages} pages x {page_bytes}", "page_bytes")
        return cls(fd, pages, page_bytes)

    def page(self, index: int) -> memoryview:
        """Page ``index``, writable, without a copy."""
        if not 0 <= index < self.pages:
            raise IndexError(f"page {index} of {self.pages}")
        return self._view[index * self.page_bytes : (index + 1) * self.page_bytes]

    def view(self) -> memoryview:
        """All pages, writable, without a copy: page i starts at i x page_bytes."""
        return self._view

    def close(self) -> None:
        """Close the fd and unmap; a view still held elsewhere keeps the mapping until it goes."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._view.release()
        try:
            self._map.close()
        except BufferError:  # a tensor over these pages is still alive: the mapping goes with it
            return
