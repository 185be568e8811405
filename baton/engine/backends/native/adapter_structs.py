"""Makes the C structs of an adapter's parts and sites, by whole columns and some parts at a time.

Knows nothing of where matrices come from. An adapter beside experts has tens of thousands of parts, and what is
done of them between two steps must not hold up the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.part_table import Rows
from baton.kernels.abi.native import BF16, F32
from baton.kernels.lora.structs import LoraPart, LoraSite

PART, SITE = np.dtype(LoraPart), np.dtype(LoraSite)
PIECE_PARTS = 1024  # whose structs are made at a time, in some 100 µs
SAME = ("first", "rank", "scale", "looked_up")  # fields of LoraPart that rows have under the same name

Structs = NDArray[Any]  # of PART or SITE


class AdapterStructs:
    """The structs of one adapter: ``parts``, an array of PART, and after ``place`` ``sites``, one of SITE.

    Parts come in the order of sites and of their outputs.
    """

    def __init__(self) -> None:
        self.parts: Structs = np.empty(0, PART)
        self.sites: Structs = np.empty(0, SITE)
        self._pieces: list[Structs] = []
        self._numbers: list[NDArray[Any]] = []

    def add(self, rows: Rows, base: int) -> Iterator[None]:
        """Adds parts whose matrices are at address ``base``, PIECE_PARTS at a time."""
        for first in range(0, len(rows), PIECE_PARTS):
            some = rows[first : first + PIECE_PARTS]
            self._pieces.append(_structs(some, base))
            self._numbers.append(some["number"])
            yield

    def join(self) -> None:
        """Joins the parts that were added to one array."""
        self.parts = np.concatenate([self.parts, *self._pieces], dtype=PART)  # given, because finding it is slow
        self._pieces = []

    def place(self, base: int, sites: int) -> None:
        """Makes the structs of ``sites`` sites, whose parts are at address ``base``."""
        numbers = np.concatenate([np.empty(0, np.int32), *self._numbers])
        assert (np.diff(numbers) >= 0).all(), "parts come in the order of sites"
        self.sites = np.zeros(sites, SITE)
        self.sites["count"] = np.bincount(numbers, minlength=sites)
        self.sites["parts"] = base + PART.itemsize * (np.cumsum(self.sites["count"]) - self.sites["count"])


def address_of(held: memoryview | Structs) -> int:
    """Returns the address of the first byte of ``held``."""
    found: int = np.frombuffer(held, np.uint8).ctypes.data if isinstance(held, memoryview) else held.ctypes.data
    return found


def _structs(rows: Rows, base: int) -> Structs:
    found = np.zeros(len(rows), PART)
    for name in SAME:
        found[name] = rows[name]
    found["a"], found["b"] = rows["a"] + base, rows["b"] + base
    found["k"], found["n"] = rows["inputs"], rows["outputs"]
    found["dtype"] = np.where(rows["narrow"], BF16, F32)
    return found
