"""Measures the rate at which memory can be read, the upper limit of decoding. Knows nothing of engines."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from baton.kernels.abi import native
from baton.kernels.abi.native import I64, P

BYTES = 256 << 20  # far beyond any cache


def seconds(work: Callable[[], object]) -> float:
    """Returns the duration of one call of ``work``, in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class MemoryRead:
    """Reads a buffer larger than the caches with all threads of the engine's pool."""

    def __init__(self) -> None:
        self._read = native.function("ceiling_read", P, I64)
        self._buffer = torch.ones(BYTES, dtype=torch.uint8)

    def rate(self) -> float:
        """Returns the bytes per second of one pass over the buffer."""
        return BYTES / seconds(lambda: self._read(self._buffer.data_ptr(), BYTES))
