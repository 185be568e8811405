"""Defines what the lead tells the other ranks between two steps: a note behind what it is about, in a memory file.

Knows nothing of how ranks are reached, or of what they do with a note.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from baton.engine.backends.ranks.placement import Placement
from baton.kv.layout.extents import Part

LENGTH = 8  # bytes at the end of the memory, with the note's length


class AdapterNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message to the ranks: adapter ``number`` has ``count`` parts more. Their rows (``part_table.py``) lie from
    byte ``at`` on of the note's memory file, which has their matrices as well. With the ``last`` of its notes the
    adapter is complete; by one without parts it is removed.
    """

    number: int
    at: int = 0
    count: int = 0
    last: bool = False


class ExpertsNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message to the ranks: from the next step on, the experts of layer ``layer`` are placed so."""

    layer: int
    placement: Placement


class PagesNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message to the ranks: the first rank of each other host copies its part of ``pages``, of ``page_bytes``
    each, to the lead's pages; then all meet. ``parts`` are by host, () for none.
    """

    pages: tuple[int, ...]
    page_bytes: int
    parts: tuple[Part, ...]


Note = AdapterNote | ExpertsNote | PagesNote
_DECODER: msgspec.json.Decoder[Note] = msgspec.json.Decoder(Note)


@contextmanager
def written(note: Note, *before: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yields the descriptor and the bytes of a memory file with ``before``, then ``note``, and closes it."""
    fd = os.memfd_create("baton-note", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.writelines(before)
        yield fd, put(note, fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def put(note: Note, fd: int, end: int) -> int:
    """Writes ``note`` to the memory file ``fd`` behind its first ``end`` bytes; returns its bytes with the note."""
    said = msgspec.json.encode(note)
    return end + os.pwrite(fd, said + len(said).to_bytes(LENGTH, "little"), end)


def read(fd: int, size: int) -> tuple[Note, memoryview]:
    """Returns the note in the memory file ``fd`` of ``size`` bytes, and the file's memory; closes ``fd``."""
    memory, end = mapped(fd, size), size - LENGTH
    return _DECODER.decode(memory[end - int.from_bytes(memory[end:], "little") : end]), memory


def mapped(fd: int, size: int) -> memoryview:
    """Returns the memory of the memory file ``fd`` of ``size`` bytes, matrices first; closes ``fd``.

    Unlike ``mmap.mmap`` it keeps no descriptor: large adapters are thousands of notes. Raises OSError.
    """
    try:
        at = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if at == _FAILED:
            raise OSError(ctypes.get_errno(), f"a note of {size} bytes can't be mapped")
    finally:
        os.close(fd)
    memory = (ctypes.c_char * size).from_address(at)
    weakref.finalize(memory, _LIBC.munmap, at, size).atexit = False
    return memoryview(memory).cast("B").toreadonly()


def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    found.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return found


_LIBC = _libc()
_FAILED = ctypes.c_void_p(-1).value
