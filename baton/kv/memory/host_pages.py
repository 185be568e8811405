"""Allocates pages in shared memory: a memfd that the engine makes and passes to the I/O process, on huge pages if
possible.

Knows nothing of what the bytes mean or who owns which page. A memfd needs no /dev/shm, so a container's limit on
that doesn't matter; it is sealed against resizing, so no peer can make a mapped page vanish. Which pages the kernel
gives (``backing``) depends on the host and is never an error:

    "transparent huge pages"   transparent_hugepage/shmem_enabled is advise, within_size, always or force
    "reserved huge pages"      otherwise, if vm.nr_hugepages leaves enough of them free
    "small pages"              otherwise
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from baton.kv.memory import copying
from baton.kv.memory.device_pages import DevicePages
from baton.protos.errors import ConfigError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_KERNEL = Path("/sys/kernel/mm")
_libc = ctypes.CDLL(None)

TRANSPARENT, RESERVED, SMALL = "transparent huge pages", "reserved huge pages", "small pages"


class PageMemory:
    """Maps ``pages`` pages of ``page_bytes`` bytes each, read-write and shared, and owns the descriptor ``fd``.

    ``backing`` names the kind of memory pages (see the module). ``device`` is the pages' mirror on a GPU, if this
    process has opened it.
    """

    def __init__(self, fd: int, pages: int, page_bytes: int, backing: str = SMALL) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
        self.fd = fd
        self.pages = pages
        self.page_bytes = page_bytes
        self.backing = backing
        self.device: DevicePages | None = None
        if backing == TRANSPARENT:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)[: pages * page_bytes]

    @classmethod
    def create(cls, pages: int, page_bytes: int, sparse: bool = False) -> PageMemory:
        """Allocates new zeroed pages; physical memory is used when they are first accessed. Raises ConfigError if
        there would be no bytes.

        ``sparse`` pages may be more than the host's memory, so no huge pages are reserved for them.
        """
        if pages < 1 or page_bytes < 1:
            raise ConfigError(f"at least one page of one byte is needed, not {pages} of {page_bytes}", "pages")
        reserved = None if sparse else cls._reserved(pages, page_bytes)
        return reserved or cls._made(pages, page_bytes)

    @classmethod
    def attach(cls, fd: int, pages: int, page_bytes: int) -> PageMemory:
        """Maps pages that another process made, and takes ownership of ``fd``. Raises ConfigError if its size
        doesn't match.
        """
        size, backing = os.fstat(fd).st_size, _backing(fd)
        if size != _file_bytes(pages * page_bytes, backing):
            raise ConfigError(f"the KV memory has {size} bytes, not {pages} pages x {page_bytes}", "page_bytes")
        return cls(fd, pages, page_bytes, backing)

    @classmethod
    def _made(cls, pages: int, page_bytes: int) -> PageMemory:
        """Allocates ordinary shared memory, which the kernel may back with huge pages by itself."""
        fd = os.memfd_create("baton-kv", _FLAGS)
        os.ftruncate(fd, pages * page_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, pages, page_bytes, _backing(fd))

    @classmethod
    def _reserved(cls, pages: int, page_bytes: int) -> PageMemory | None:
        """Allocates huge pages that the host has reserved; None if others are as good, or too few are left."""
        size = _file_bytes(pages * page_bytes, RESERVED)
        if transparent() or pages * page_bytes < _huge_bytes() or size > _reserve_bytes():
            return None
        fd = os.memfd_create("baton-kv", _FLAGS | os.MFD_HUGETLB)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, pages, page_bytes, RESERVED)  # mapping them claims them: nothing is missing later
        except OSError:  # somebody else was faster
            os.close(fd)
            return None

    @property
    def bytes(self) -> int:
        """Returns the size of the memory in bytes; on reserved huge pages it is more than that of the pages."""
        return len(self._map)

    def page(self, index: int) -> memoryview:
        """Returns page ``index``, writable, without a copy. Raises IndexError."""
        if not 0 <= index < self.pages:
            raise IndexError(f"page {index} of {self.pages}")
        return self._view[index * self.page_bytes : (index + 1) * self.page_bytes]

    def view(self) -> memoryview:
        """Returns all pages, writable, without a copy: page i starts at i x page_bytes."""
        return self._view

    def close(self) -> None:
        """Closes the descriptor and unmaps the memory; it stays mapped while a view is in use elsewhere."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._view.release()
        try:
            self._map.close()
        except BufferError:  # a tensor over these pages is still alive: the mapping goes with it
            return

    def __del__(self) -> None:
        """Closes the descriptor of pages that are no longer referenced; the mapping ends by itself."""
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def drop_bytes(view: memoryview, begin: int, count: int) -> None:
    """Gives back the physical memory of bytes ``begin`` … ``begin + count - 1`` of shared memory, which read as
    zeros afterwards in every process. Parts of the kernel's pages at both ends stay, and so does memory that isn't
    shared.
    """
    start = copying.address(view) + begin
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + count) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_REMOVE)


def transparent(kernel: Path = _KERNEL) -> bool:
    """Returns whether this host lets a process get transparent huge pages for shared memory."""
    said = _read(kernel / "transparent_hugepage" / "shmem_enabled")
    return any(f"[{mode}]" in said for mode in ("always", "within_size", "advise", "force"))


def _reserve_bytes(kernel: Path = _KERNEL) -> int:
    """Returns the bytes of reserved huge pages, of the default size, that nobody has claimed."""
    folder = kernel / "hugepages" / f"hugepages-{_huge_bytes() >> 10}kB"
    free, claimed = (_read(folder / name) for name in ("free_hugepages", "resv_hugepages"))
    return (int(free) - int(claimed)) * _huge_bytes() if free and claimed else 0


def _huge_bytes() -> int:
    """Returns the size of the kernel's default huge page."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    said = next((line for line in lines if line.startswith("Hugepagesize:")), "Hugepagesize: 2048 kB")
    return int(said.split()[1]) << 10


def _file_bytes(size: int, backing: str) -> int:
    """Returns the file size for ``size`` bytes: reserved huge pages are allocated whole."""
    return -(-size // _huge_bytes()) * _huge_bytes() if backing == RESERVED else size


def _backing(fd: int) -> str:
    """Returns the backing of an open memfd: the file system of reserved huge pages has blocks of their size."""
    if os.fstatvfs(fd).f_bsize >= _huge_bytes():
        return RESERVED
    return TRANSPARENT if transparent() else SMALL


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
