"""A circuit breaker for stores that may hang: a request waits a bounded time once, and then nobody asks for a
while.

Knows nothing of stores or of what they are asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

WAIT_S = 0.5  # a busy machine may run this process or the store as late as that, although nothing is broken
REST_S = 1.0  # how long a store that was late isn't asked again

T = TypeVar("T")


class CircuitBreaker:
    """Bounds waiting for one store: after an answer later than ``wait_s``, calls fail at once for ``rest_s``
    seconds.

    Then one call at a time tries the store again, while the others still fail at once.
    """

    def __init__(
        self, wait_s: float = WAIT_S, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wait_s, self._rest_s, self._clock = wait_s, rest_s, clock
        self._resting_until: float | None = None

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of ``question()``.

        Raises TimeoutError if it is late, or isn't called because the store was late before.
        """
        self._take_turn()
        try:
            async with asyncio.timeout(self._wait_s):
                answer = await question()
        except TimeoutError:
            self._resting_until = self._clock() + self._rest_s
            raise
        self._resting_until = None
        return answer

    def _take_turn(self) -> None:
        """Raises TimeoutError while the store rests; then the first caller tries, and others still pass."""
        if self._resting_until is None:
            return
        now = self._clock()
        if now < self._resting_until:
            raise TimeoutError("the store was late a moment ago and isn't asked")
        self._resting_until = now + self._wait_s + self._rest_s
