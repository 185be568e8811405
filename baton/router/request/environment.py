"""The router's sources of time and randomness, which tests replace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec


class Environment(msgspec.Struct, frozen=True):
    """Gives time and randomness: ``clock`` monotonic seconds, ``wall_clock`` Unix seconds, ``entropy(n)`` n random
    bytes.
    """

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    entropy: Callable[[int], bytes] = os.urandom

    def new_id(self) -> str:
        """Returns a new unique request id of 24 hex digits."""
        return self.entropy(12).hex()

    def new_seed(self) -> int:
        """Returns a random sampling seed of 64 bits."""
        return int.from_bytes(self.entropy(8), "little")
