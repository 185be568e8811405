"""Where a router takes time and randomness from. Knows nothing of requests; tests give it clocks of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec


class Environment(msgspec.Struct, frozen=True):
    """Gives time and randomness: ``clock`` in monotonic seconds, ``wall_clock`` in seconds since 1970,
    ``entropy(n)`` n bytes.
    """

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    entropy: Callable[[int], bytes] = os.urandom

    def new_id(self) -> str:
        """Returns a unique id of 24 hex digits; a caller's own id is only echoed, since two calls may carry it."""
        return self.entropy(12).hex()

    def new_seed(self) -> int:
        """Returns a random sampling seed of 64 bits."""
        return int.from_bytes(self.entropy(8), "little")
