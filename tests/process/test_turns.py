"""Tests that many calls leave the event loop to others between them."""

from __future__ import annotations

import asyncio

from baton.process.turns import A_TURN, call_in_turns


async def test_the_first_calls_are_made_at_once_and_others_run_between_the_rest() -> None:
    called: list[int] = []
    seen: list[int] = []
    call_in_turns(called.append, range(3 * A_TURN + 1))
    assert len(called) == A_TURN
    while len(called) <= 3 * A_TURN:
        await asyncio.sleep(0)
        seen.append(len(called))
    assert seen == [2 * A_TURN, 3 * A_TURN, 3 * A_TURN + 1]
    assert called == list(range(3 * A_TURN + 1))
    call_in_turns(called.append, ())
