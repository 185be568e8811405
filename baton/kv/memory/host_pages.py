"""Keeps pages in shared memory: a memfd that the engine makes and hands to the I/O process, on huge pages if it
can.

Knows nothing of what the bytes mean or who owns which page. A memfd needs no /dev/shm, so a container's limit on
that doesn't matter; it is sealed against resizing, so no peer can make a mapped page vanish. What the kernel gives
(``backing``) is up to the host and never a reason not to start:

    "transparent huge pages"   transparent_hugepage/shmem_enabled is advise, within_size, always or force
    "reserved huge pages"      else, where vm.nr_hugepages leaves enough of them free
    "small pages"              else
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from baton.kv.memory.device_pages import DevicePages
from baton.protos.errors import ConfigError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_KERNEL = Path("/sys/kernel/mm")

TRANSPARENT, RESERVED, SMALL = "transparent huge pages", "reserved huge pages", "small pages"


class PageMemory:
    """Maps ``pages`` pages of ``page_bytes`` bytes each, read-write and shared. It owns ``fd``.

    ``device`` is their mirror on a card, in a process that has it open.
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
    def create(cls, pages: int, page_bytes: int) -> PageMemory:
        """Makes new zeroed pages; physical memory is taken as they are touched. Raises ConfigError."""
        if pages < 1 or page_bytes < 1:
            raise ConfigError(f"at least one page of one byte is needed, not {pages} of {page_bytes}", "pages")
        return cls._reserved(pages, page_bytes) or cls._made(pages, page_bytes)

    @classmethod
    def attach(cls, fd: int, pages: int, page_bytes: int) -> PageMemory:
        """Maps pages that another process made and takes ``fd`` over. Raises ConfigError where its size is
        another.
        """
        size, backing = os.fstat(fd).st_size, _backing(fd)
        if size != _file_bytes(pages * page_bytes, backing):
            raise ConfigError(f"the KV memory has {size} bytes, not {pages} pages x {page_bytes}", "page_bytes")
        return cls(fd, pages, page_bytes, backing)

    @classmethod
    def _made(cls, pages: int, page_bytes: int) -> PageMemory:
        """Of ordinary shared memory, which the kernel may put on huge pages by itself."""
        fd = os.memfd_create("baton-kv", _FLAGS)
        os.ftruncate(fd, pages * page_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, pages, page_bytes, _backing(fd))

    @classmethod
    def _reserved(cls, pages: int, page_bytes: int) -> PageMemory | None:
        """Of huge pages that the host has set aside; None where others are as good, or none is left."""
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
        """Returns the size of the memory, which on reserved huge pages is more than the pages take."""
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
        """Closes the descriptor and unmaps; a view still held elsewhere keeps the mapping until it goes."""
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
        """Closes the descriptor of pages that nobody knows any more; the mapping goes by itself."""
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def transparent(kernel: Path = _KERNEL) -> bool:
    """Returns whether shared memory may lie on huge pages where a process asks for it."""
    said = _read(kernel / "transparent_hugepage" / "shmem_enabled")
    return any(f"[{mode}]" in said for mode in ("always", "within_size", "advise", "force"))


def _reserve_bytes(kernel: Path = _KERNEL) -> int:
    """Bytes of the default size's huge pages that nobody has claimed."""
    folder = kernel / "hugepages" / f"hugepages-{_huge_bytes() >> 10}kB"
    free, claimed = (_read(folder / name) for name in ("free_hugepages", "resv_hugepages"))
    return (int(free) - int(claimed)) * _huge_bytes() if free and claimed else 0


def _huge_bytes() -> int:
    """The kernel's default huge page."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    said = next((line for line in lines if line.startswith("Hugepagesize:")), "Hugepagesize: 2048 kB")
    return int(said.split()[1]) << 10


def _file_bytes(size: int, backing: str) -> int:
    """What a memory of ``size`` takes: a file on reserved huge pages has whole ones."""
    return -(-size // _huge_bytes()) * _huge_bytes() if backing == RESERVED else size


def _backing(fd: int) -> str:
    """Of an open memfd: the file system of reserved huge pages has blocks of their size."""
    if os.fstatvfs(fd).f_bsize >= _huge_bytes():
        return RESERVED
    return TRANSPARENT if transparent() else SMALL


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
