"""Checks how much of an adapter an engine's loop takes between two steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.engine.steps.loop import ADAPTERS_SHARE, StepLoop


@pytest.mark.parametrize(("step_s", "taken"), [(0.0, 1), (0.03, 1), (1.0, 20), (1000.0, 50)])
def test_after_a_longer_step_more_pieces_are_taken(step_s: float, taken: int) -> None:
    clock, pieces, piece_s = SimpleNamespace(now=0.0, turns=0), 50, 0.001

    class Reading:
        @property
        def holding(self) -> bool:
            return clock.turns < pieces

        reading = holding

        def turn(self) -> tuple[()]:
            clock.turns, clock.now = clock.turns + 1, clock.now + piece_s
            return ()

    loop = SimpleNamespace(
        parts=SimpleNamespace(adapters=Reading()), clock=lambda: clock.now, _step_s=step_s, _tell_adapters=list
    )
    StepLoop._take_adapters(loop)  # type: ignore[arg-type]
    assert clock.turns == taken
    assert step_s == 1000.0 or clock.now <= ADAPTERS_SHARE * step_s + piece_s + 1e-9
