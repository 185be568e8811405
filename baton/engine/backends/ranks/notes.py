"""Defines what the lead tells the other ranks between two steps: a note behind its bytes, in a memory file.

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

from baton.engine.adapters.packed import PackedPart
from baton.engine.backends.ranks.placement import Placement

LENGTH = 8  # bytes at the end of the memory, with the note's length


class AdapterNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message to the ranks: adapter ``number`` has these ``parts``, whose matrices are stored before the note.
    With the ``last`` of its notes it is complete; without parts it is removed.
    """

    number: int
    parts: tuple[PackedPart, ...] = ()
    last: bool = False


class ExpertsNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message to the ranks: from the next step on, the experts of layer ``layer`` are placed so."""

    layer: int
    placement: Placement


Note = AdapterNote | ExpertsNote
_DECODER: msgspec.json.Decoder[Note] = msgspec.json.Decoder(Note)


@contextmanager
def written(note: Note, matrices: memoryview = memoryview(b"")) -> Iterator[tuple[int, int]]:
    """Yields the descriptor and the bytes of a memory file with ``matrices`` and ``note``, and closes it."""
    said = msgspec.json.encode(note)
    fd = os.memfd_create("baton-note", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.writelines((matrices, said, len(said).to_bytes(LENGTH, "little")))
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


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
