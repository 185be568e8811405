"""Makes the rooms in device memory by which ranks on cards meet, and gives each a view of all. Torch-free.

Knows nothing of models or of processes. A room is made by its owner, and opened by the others by 64 bytes that the
owner hands out. On the SIMT shim it is memory that processes share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from baton.kernels.abi.native import I32, I64, P
from baton.kernels.cuda.library import CudaLibrary

MOST_CARDS = 64  # exchange.h: MOST_CARDS
HANDLE_BYTES = 64  # of CUDA's handles
HALF_FLOATS = 4 << 20  # of each half of a room: a step's widest register goes over in parts of 16 MiB


class ExchangeStruct(ctypes.Structure):
    """Mirrors the C struct Exchange of exchange.h: one rank's view of all rooms."""

    _fields_ = (
        ("rooms", P * MOST_CARDS),
        ("lost", P),
        *((name, I64) for name in ("half_floats", "bound_ns")),
        *((name, I32) for name in ("rank", "count")),
    )


class Rooms:
    """One rank's room on the card of the calling thread, and those of the others once they are opened.

    Raises DeviceError where the device has no memory, or can't reach another's.
    """

    def __init__(self, device: CudaLibrary, half_floats: int = HALF_FLOATS) -> None:
        self._device, self.half_floats = device, half_floats
        at, handle = P(), ctypes.create_string_buffer(HANDLE_BYTES)
        device.call("room_make", half_floats, ctypes.byref(at), handle)
        assert at.value is not None
        self.own, self.handle = at.value, handle.raw
        self._opened: list[int] = []

    def open(self, handles: Sequence[bytes], rank: int, bound_s: float, lost: int | None = None) -> ExchangeStruct:
        """Returns the view of ``rank``, to whose place in ``handles`` the own room belongs.

        ``bound_s`` limits the seconds of waiting for another rank, 0: not at all. ``lost`` is the address, as
        launches see it, of the word that says who is lost.
        """
        assert handles[rank] == self.handle, "the ranks' rooms are out of order"
        rooms = [self.own if at == rank else self._open(handle) for at, handle in enumerate(handles)]
        padded = (P * MOST_CARDS)(*rooms)
        return ExchangeStruct(padded, lost, self.half_floats, int(bound_s * 1e9), rank, len(handles))

    def lost(self) -> int:
        """Returns who is lost by the meetings so far, in the collective's code; 0: nobody."""
        who = ctypes.c_uint32()
        self._device.call("room_lost", self.own, ctypes.byref(who))
        return who.value

    def close(self) -> None:
        """Closes all rooms; the own one must be closed last of all processes that opened it."""
        while self._opened:
            self._device.call("room_close", self._opened.pop(), self.half_floats, 0)
        if self.own:
            self._device.call("room_close", self.own, self.half_floats, 1)
            self.own = 0

    def _open(self, handle: bytes) -> int:
        at = P()
        self._device.call("room_open", handle, self.half_floats, ctypes.byref(at))
        assert at.value is not None
        self._opened.append(at.value)
        return at.value


def cards(device: CudaLibrary) -> int:
    """Returns the number of cards that this process sees; on the shim as many as ranks can be."""
    count = I32()
    device.call("card_count", ctypes.byref(count))
    return count.value


def use_card(device: CudaLibrary, index: int) -> None:
    """Makes card ``index`` the one of the calling thread. Raises DeviceError."""
    device.call("card_use", index)


def unreachable(device: CudaLibrary, indices: Iterable[int]) -> list[int]:
    """Returns those of the cards ``indices`` to whose memory the calling thread's card can't write."""
    found, yes = [], I32()
    for index in indices:
        device.call("card_reaches", index, ctypes.byref(yes))
        found += [] if yes.value else [index]
    return found
