"""Copies and checksums the bytes of many blocks at once (XXH3-64), by native code if there is any. Torch-free.

Knows nothing of frames or of pages' owners. The caller must keep every view alive during a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from baton.kernels.abi import native
from baton.kv.memory import block_sums
from baton.kv.memory.block_sums import Bytes

_BYTE = ctypes.c_char
_get_buffer, _release_buffer = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
_get_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_release_buffer.argtypes = [ctypes.c_void_p]
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
_BUFFER_STRUCT = ctypes.c_void_p * 16  # Py_buffer: its first field is the address; 10 words, so far


def prepare() -> None:
    """Loads the native code, which is built first if necessary (seconds, once per machine). Without this call, the
    first copy does so.
    """
    native.library()


def checksums(blocks: Sequence[memoryview]) -> list[int]:
    """Returns the XXH3-64 of each of ``blocks``, which must have equal lengths."""
    return block_sums.used().copy(None, list(map(address, blocks)), _common_size(blocks)) if blocks else []


def copy(places: Sequence[memoryview], blocks: Sequence[memoryview]) -> list[int]:
    """Copies ``blocks``, of equal length, into ``places``; returns the XXH3-64 of each copy. Raises ValueError if
    lengths differ.
    """
    if blocks and _common_size(blocks) != len(places[0]):
        raise ValueError(f"blocks of {len(blocks[0])} bytes don't fit places of {len(places[0])}")
    return copy_from(places, list(map(address, blocks)))


def copy_from(places: Sequence[memoryview], addresses: Sequence[int]) -> list[int]:
    """Copies from memory ``addresses``, as many bytes as each place has, into ``places``; returns the XXH3-64 of
    each copy.

    The caller keeps the memory mapped. Raises ValueError if numbers or lengths differ.
    """
    if len(places) != len(addresses):
        raise ValueError(f"{len(addresses)} blocks for {len(places)} places")
    return block_sums.used().copy(list(map(address, places)), addresses, _common_size(places)) if places else []


def scatter(places: Sequence[memoryview], run: memoryview) -> list[int]:
    """Copies ``run``, which has one block after the other, into ``places``; returns the XXH3-64 of each copy.
    Raises ValueError if sizes differ.
    """
    size = _common_size(places) if places else 0
    if len(run) != size * len(places):
        raise ValueError(f"{len(run)} bytes don't fit {len(places)} places of {size}")
    return copy_from(places, range(begin := address(run), begin + len(run), size)) if places else []


def gather(blocks: Sequence[memoryview], head: Callable[[list[int]], bytes]) -> bytes:
    """Returns ``head(checksums)`` followed by the bytes of ``blocks``, which have equal lengths and are copied and
    hashed in one pass.

    The length of ``head``'s result must not depend on the checksums.
    """
    room, size = len(head([0] * len(blocks))), _common_size(blocks)
    made = _new_bytes(None, room + size * len(blocks))
    begin = address(made)  # nobody else has seen the object: it may be filled still
    places = [begin + room + number * size for number in range(len(blocks))]
    checksums = block_sums.used().copy(places, list(map(address, blocks)), size)
    ctypes.memmove(begin, head(checksums), room)
    return made


def address(view: Bytes) -> int:
    """Returns the memory address at which ``view`` begins, valid while the caller keeps the view."""
    if isinstance(view, memoryview) and not view.readonly:
        return ctypes.addressof(_BYTE.from_buffer(view))
    held = _BUFFER_STRUCT()
    _get_buffer(view, held, 0)
    try:
        return held[0] or 0
    finally:
        _release_buffer(held)


def _common_size(views: Sequence[memoryview]) -> int:
    """Returns the common length; raises ValueError if lengths differ, because native code doesn't check them."""
    size = len(views[0])
    if any(len(view) != size for view in views):
        raise ValueError("blocks of one call must be equally long")
    return size
