"""Looking back on an answer: drafts are those of that time, and judged by what was written since."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.speculate.allowance import PROVEN
from baton.engine.speculate.draft import Draft, SequenceView, Speculator
from baton.engine.speculate.drafter import LOOKED_BACK, Drafter
from baton.engine.speculate.prompt_lookup import PromptLookup
from baton.engine.speculate.suffix import Suffix
from baton.engine.speculate.watch import MOST_PLACES, EarlierView, earlier, places
from tests.engine.speculate.texts import Written
from tests.engine.speculate.world import Clock, Costly, Known, Machine, flat, gentle, play, quick
from tests.thorough import later

CALL_S, AGAIN = 100e-6, 0.25  # of 2 ms: it is felt; with warm caches less


@pytest.mark.parametrize("kind", [PromptLookup, Suffix])
@given(st.lists(st.integers(0, 2), min_size=3, max_size=60), st.integers(1, 20), st.booleans())
def test_a_draft_of_earlier_is_the_one_that_was_made_then(
    kind: type[Speculator], tokens: list[int], back: int, branches: bool
) -> None:
    now, then = kind(), kind()
    now.branches = then.branches = branches
    text, length = Written(1, tokens, 1), max(1, len(tokens) - back)
    now.propose(text, 8)
    assert now.propose(earlier(text, length), 8) == then.propose(Written(1, tokens[:length], 1), 8)


def test_an_earlier_view_ends_where_it_says() -> None:
    view = earlier(Written(7, list(range(20)), 5, prediction=(3,)), 12)
    assert (view.seq, view.outputs, view.draft_room, len(view.tokens)) == (7, 7, 8, 12)
    assert list(view.tokens) == list(view.tokens[:]) == list(range(12))
    assert (view.tokens[-1], view.tokens[-3:], view.tokens[8:99]) == (11, [9, 10, 11], [8, 9, 10, 11])
    assert list(view.request.prediction) == [3]
    with pytest.raises(IndexError):
        view.tokens[12]


def test_no_more_than_the_answer_is_looked_back_on() -> None:
    assert list(places(Written(1, list(range(20)), 17), 9)) == [17, 18, 19]
    assert len(places(Written(1, list(range(200)), 5), 999)) == MOST_PLACES
    assert len(places(Written(1, list(range(200)), 5), 4)) == 4


@pytest.mark.parametrize(
    ("machine", "batch", "chance"),
    [(flat, 1, 0.3), (quick, 1, 0.6), later(quick, 1, 0.9), (gentle, 8, 0.6), later(gentle, 8, 0.9)],
)
def test_where_calls_are_felt_drafts_bring_most_of_what_the_best_depth_would(
    machine: Machine, batch: int, chance: float
) -> None:
    """The look back tells in a few calls what else would take thousands of steps."""
    clock, known = Clock(), Known(chance)
    drafter = Drafter([Costly(known, clock, CALL_S / batch, AGAIN)], clock)
    steps = 2400 if batch == 1 else 1200
    found = play(drafter, clock, machine, (known.text,), batch, steps, noise=0.03, warm=steps // 2)
    best = max(
        sum(chance**at for at in range(depth + 1)) * machine(batch) / machine(batch * (1 + depth))
        for depth in range(17)
    )
    assert found.rate >= 0.85 * best


def test_looking_back_takes_next_to_nothing_where_nothing_stands() -> None:
    clock, known = Clock(), Known(0.0)
    drafter = Drafter([Costly(known, clock, CALL_S, AGAIN)], clock)
    found = play(drafter, clock, quick, (known.text,), 1, 4000)
    assert found.rate >= 0.99
    assert max(found.steps) < 1.0 + LOOKED_BACK + 0.1
    assert sum(step > 1.01 for step in found.steps) < 0.01 * len(found.steps)
    assert 1 < sum(step > 1.2 for step in found.steps) < 0.002 * len(found.steps), "ever more seldom"


class Failing(Known):
    """Proposes what will be written until ``until`` on the clock, and what won't from then on."""

    def __init__(self, chance: float, seed: int, clock: Clock, until: float) -> None:
        super().__init__(chance, seed)
        self._clock, self._until = clock, until

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        if self._clock() > self._until:
            self._chance = 0.0
        return super().propose(text, budget)


@pytest.mark.parametrize(("batch", "seed"), [(1, 0), (1, 3), (8, 1)])
def test_what_drafts_once_brought_makes_no_looks_frequent_for_good(batch: int, seed: int) -> None:
    clock = Clock()
    failing = Failing(0.4, seed, clock, 300 * quick(batch))
    drafter = Drafter([Costly(failing, clock, CALL_S, AGAIN)], clock)
    found = play(drafter, clock, quick, (failing.text,), batch, 4000, seed)
    assert not drafter._allowance.is_promising
    assert sum(step > 1.2 for step in found.steps[1500:]) < 0.004 * 2500


def test_no_place_is_looked_back_on_twice() -> None:
    clock, known = Clock(), Known(1.0)
    drafter, text = Drafter([Costly(known, clock)], clock), Written(1, [1, 2], 1)
    asked = list[int]()

    def propose(view: SequenceView) -> Draft:
        asked.append(view.outputs)
        return Draft([9], "x", 0)

    for wrote in (4, 2, 2):
        text.tokens += [5] * wrote
        drafter._judge.look_back(text, propose, 1, 99)
    assert asked == list(range(1 + 8))
    drafter.end(text)
    assert not drafter._judge._judged


class Recording(Known):
    """Counts the calls for a text as it was earlier."""

    looked_back = 0

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        self.looked_back += isinstance(text, EarlierView)
        return super().propose(text, budget)


def test_where_drafts_once_paid_and_nobody_is_asked_any_more_a_call_looks_back_as_well() -> None:
    """Else their chances would stay those of the time when they failed."""
    clock, known = Clock(), Recording(0.0)
    drafter = Drafter([Costly(known, clock, CALL_S, AGAIN)], clock)
    play(drafter, clock, quick, (known.text,), 1, 300)
    before, drafter._allowance._earned = known.looked_back, PROVEN + 1.0
    drafter._asking._usual = 0.0
    play(drafter, clock, quick, (known.text,), 1, 20)
    assert drafter._allowance.is_proven
    play(drafter, clock, quick, (known.text,), 1, 280)
    assert known.looked_back > before + MOST_PLACES // 4
