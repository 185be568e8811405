"""Tests live comparison: a set share of the steps drafts nothing, and beside them shows what drafts bring."""

from __future__ import annotations

import pytest

from baton.engine.speculate.comparison import STRETCH, Comparison
from baton.engine.speculate.drafter import Drafter
from baton.protos.measurements import SpeculationTotals
from tests.engine.speculate.test_depth import Right
from tests.engine.speculate.texts import Written
from tests.engine.speculate.world import wrote


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5])
def test_the_share_of_steps_without_drafts_is_kept_in_stretches(share: float) -> None:
    one, controls, changes = Comparison(share), 0, 0
    for _ in range(16_000):
        before = one.is_control
        controls += one.begin()
        changes += one.is_control != before
    assert controls == pytest.approx(16_000 * share, rel=0.02, abs=STRETCH)
    assert changes <= 2 * (controls // STRETCH + 1)


def test_tokens_and_seconds_go_to_the_step_that_they_are_of() -> None:
    one = Comparison(0.5)
    for _ in range(640):
        control = one.begin()
        one.add(2, 0.0)
        one.add(0 if control else 2, 1.0 if control else 1.25)
    totals = SpeculationTotals(
        tokens=(one.drafts.tokens, one.control.tokens), seconds=(one.drafts.seconds, one.control.seconds)
    )
    assert one.drafts.tokens + one.control.tokens == 640 * 2 + one.drafts.tokens // 2
    assert totals.gain == pytest.approx(4 / 1.25 / 2)
    assert SpeculationTotals(tokens=(5, 0), seconds=(1.0, 0.0)).gain == 0.0


def test_a_drafter_tells_what_stood_by_place_and_drafts_nothing_in_the_share() -> None:
    drafter, texts, drafted = Drafter([Right()], lambda: 0.0, control_share=0.25), [Written(1, [1])], 0
    for _ in range(800):
        drafts = drafter.plan(texts)
        drafted += bool(drafts)
        drafter.observe(1 + sum(len(draft.tokens) for draft in drafts.values()), 0, 0.01)
        wrote(drafter, texts[0], drafts.get(1), [1, 1, 2])
    totals = drafter.totals
    assert totals.sequence_steps == 800
    assert 0 < drafted <= 608
    assert totals.accepted[:2] == totals.judged[:2]
    assert totals.judged[2] > 0 == totals.accepted[2] == totals.judged[3]
    assert totals.gain > 2.0
