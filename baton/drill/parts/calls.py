"""Calls of routers' HTTP applications by simulated clients who want whole answers: operators, and keepers of data.

Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.drill.loop import seeded_loop
from baton.drill.machines.clock import CLOCK
from baton.drill.parts.http import ADMIN, HttpAsk, HttpCall, key_text
from baton.drill.parts.router import SimulatedRouter

Leaving = Callable[[HttpCall], object]  # is given a call that begins, to have its client leave it
WAITS_S = 60.0  # seconds that a client waits for a router's answer


class RouterCalls:
    """Plays calls at ``routers``; what no router may do is passed to ``violated``.

    ``busy_s`` is how long the run's own load may keep workers from what a call needs of them, in seconds.
    """

    def __init__(
        self, routers: Sequence[SimulatedRouter], violated: Callable[[str], None], busy_s: float = 0.0
    ) -> None:
        self._routers, self._violated, self._waits_s = routers, violated, WAITS_S + busy_s

    async def asked(self, router: int, asks: HttpAsk, begins: Leaving = lambda call: None) -> HttpCall | None:
        """Plays a call at router number ``router``; returns None if it isn't up. ``begins`` is given the call."""
        at, call = self._routers[router], HttpCall(asks._replace(key=key_text(ADMIN)))
        if at.parts is None:
            return None
        begins(call)
        here = CLOCK.set(at.clock)
        try:
            playing = at.process.spawn(call.play(at.parts.app), f"http {asks.method} {asks.path}")
        finally:
            CLOCK.reset(here)
        await asyncio.wait({playing}, timeout=self._waits_s)
        if not playing.done():
            self._violated(f"{asks.method} {asks.path} isn't answered within {self._waits_s:g} s")
            call.left.set()
        await asyncio.gather(playing, return_exceptions=True)
        if not playing.cancelled() and (error := playing.exception()) is not None:
            self._violated(f"{asks.method} {asks.path} fails: {error!r}")
        return call


def leaves_after(seconds: float) -> Leaving:
    """Returns what has a client hang up after so many seconds."""
    return lambda call: seeded_loop().call_later(seconds, call.left.set)
