"""Shared memory for the ranks of one host, and calls of the collectives over it. Torch-free.

Knows nothing of models or of who starts a rank. A group's memory begins as zeros: the page of the barrier, then two
slots for each rank.
"""

from __future__ import annotations

import ctypes

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, NativeFunction, P

MOST_RANKS = 64  # collective.h: MOST_RANKS
STUCK = 1 << 16  # collective.h: RANK_STUCK
ALIGN = 4096  # bytes of a page of memory, of which mappings are made


class Group(ctypes.Structure):
    """Mirrors Group of collective.h: one rank's view of the shared memory, and its connections to other hosts."""

    _fields_ = (
        *((name, P) for name in ("meeting", "slots")),
        *((name, I64) for name in ("slot_bytes", "bound_ns")),
        *((name, I32) for name in ("rank", "count", "turn", "pad")),
        ("links", P),
    )


class RankIsLost(Exception):
    """Raised if a rank of the group has ended, or is stuck; ``rank`` and ``stuck`` say which."""

    def __init__(self, code: int) -> None:
        self.rank, self.stuck = code % STUCK - 1, bool(code & STUCK)
        super().__init__(f"rank {self.rank} is {'stuck' if self.stuck else 'gone'}")


def group_bytes(count: int, slot_bytes: int) -> int:
    """Returns the bytes of the memory of a group of ``count`` ranks; ``slot_bytes`` must be at least 64 per
    rank.
    """
    assert slot_bytes >= 64 * count, "a part of no bytes would never end"
    return _meeting_bytes() + 2 * count * slot_bytes


def group_at(address: int, rank: int, count: int, slot_bytes: int, bound_s: float) -> Group:
    """Returns rank ``rank``'s view of the memory at ``address``, a multiple of 64.

    ``bound_s`` is the seconds that a collective waits for others at most; 0 for no limit.
    """
    slots = address + _meeting_bytes()
    return Group(address, slots, slot_bytes, int(bound_s * 1e9), rank, count, 0, 0, None)


class Collective:
    """Calls the collectives of one rank on float32 arrays, given by address. Each raises RankIsLost."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._at = ctypes.addressof(group)
        self._meet = _call("meet", P)
        self._reduce = _call("all_reduce", P, P, I64)
        self._gather = _call("all_gather", P, P, I64, P)
        self._exchange = _call("all_to_all", P, P, I64, P)

    def meet(self) -> None:
        """Waits until every rank has called it as often as this one (a barrier)."""
        _require_all(self._meet(self._at))

    def all_reduce(self, x: int, count: int) -> None:
        """Replaces ``count`` floats at address ``x`` by their sums over the ranks, added in the order of the
        ranks.
        """
        _require_all(self._reduce(self._at, x, count))

    def all_gather(self, mine: int, count: int, out: int) -> None:
        """Writes the ``count`` floats at ``mine`` of every rank to address ``out``, in the order of the ranks."""
        _require_all(self._gather(self._at, mine, count, out))

    def all_to_all(self, mine: int, count: int, out: int) -> None:
        """Sends part i of ``mine`` to rank i, and receives part i of ``out`` from rank i; a part is ``count``
        floats.
        """
        _require_all(self._exchange(self._at, mine, count, out))


def lose(meeting: int, rank: int) -> None:
    """Marks ``rank`` as lost for all ranks of the group whose memory begins at ``meeting``."""
    native.function("collective_lose", P, I32)(meeting, rank)


def _require_all(code: int | None) -> None:
    if code:
        raise RankIsLost(code)


def _call(name: str, *arguments: type[ctypes.c_void_p] | type[ctypes.c_int64]) -> NativeFunction:
    return native.function(f"collective_{name}", *arguments, result=I32)


def _meeting_bytes() -> int:
    size = native.function("collective_meeting_bytes", result=I64)()
    assert size is not None
    return -(-size // ALIGN) * ALIGN
