"""Tests how deep to speculate: the best of all choices, from costs and chances that are learned."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.speculate.acceptance import AcceptanceEstimate, expected
from baton.engine.speculate.allowance import START, Allowance
from baton.engine.speculate.call_estimate import CallEstimate
from baton.engine.speculate.depth import FELT_MARGIN, MARGIN, UNFELT, best_depths, cost
from baton.engine.speculate.draft import MOST_DRAFTS, Draft, SequenceView, Speculator
from baton.engine.speculate.drafter import MOST_ENDED, Drafter
from baton.engine.speculate.probe import LAST, Probe
from baton.engine.speculate.prompt_lookup import PromptLookup
from baton.engine.speculate.row_cost import RowCost
from tests.engine.speculate.texts import Written
from tests.engine.speculate.world import steep, wrote
from tests.thorough import later


def falling(chances: list[float]) -> list[float]:
    return list(itertools.accumulate(chances, lambda all_before, one: all_before * one))


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=3).map(falling), min_size=1, max_size=3),
    st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9),
    st.integers(0, 2),
)
def test_no_other_depths_bring_more_tokens_per_second(
    chances: list[list[float]], slopes: list[float], others: int
) -> None:
    seconds, sequences = 1.0 + np.cumsum([0.0, *slopes]), len(chances) + others

    def rate(depths: tuple[int, ...]) -> float:
        tokens = sequences + sum(sum(one[:depth]) for one, depth in zip(chances, depths, strict=True))
        return tokens / float(seconds[sum(depths)])

    choices = {depths: rate(depths) for depths in itertools.product(*(range(len(one) + 1) for one in chances))}
    none = rate((0,) * len(chances))
    unfelt = {d: found for d, found in choices.items() if seconds[sum(d)] <= (1.0 + UNFELT) * seconds[0]}
    best = max(choices.values())
    if best < (1.0 + FELT_MARGIN) * none:
        best = max(unfelt.values())
    found = tuple(best_depths(chances, sequences, seconds))
    assert rate(found) == pytest.approx(best) or (not any(found) and best < (1.0 + MARGIN) * none)


def test_a_step_that_users_feel_brings_clearly_more_than_it_costs() -> None:
    chances = [[0.3, 0.1]]
    assert best_depths(chances, 1, np.array([1.0, 1.01, 1.3])) == [1], "it costs next to nothing"
    assert best_depths(chances, 1, np.array([1.0, 1.25, 1.4])) == [0], "4% more tokens a second"
    assert best_depths(chances, 1, np.array([1.0, 1.15, 1.4])) == [1], "13%"


def test_a_step_that_should_be_short_holds_fewer_drafts() -> None:
    seconds = np.linspace(1.0, 2.0, 11)
    assert best_depths([[1.0] * 10], 1, seconds) == [10]
    assert best_depths([[1.0] * 10], 1, seconds, limit_s=1.35) == [3]
    assert best_depths([[1.0] * 10], 1, seconds, limit_s=0.5) == [0]


def test_a_stair_in_the_costs_hides_no_depth_behind_it() -> None:
    """A kernel takes one or two rows at once, or up to eight at once for twice as much."""
    costs, chances = RowCost(), [falling([0.95] * 16)]
    for _ in range(20):
        for rows, seconds in ((1, 7.5e-3), (2, 9.6e-3), (3, 18.3e-3)):
            costs.observe(rows, seconds)
    found = costs.seconds(1, 16)
    assert found[16] < 18.3e-3 * (17 / 3) ** 0.55
    assert best_depths(chances, 1, found)[0] > 3, "what is thought too dear is never tried"


def judged(
    chances: AcceptanceEstimate, seq: int, rate: float, count: int, rng: random.Random, grade: int = 0
) -> None:
    for _ in range(count):
        draft = Draft([1] * 4, "x", grade)
        chances.judge(seq, draft, next((at for at in range(4) if rng.random() >= rate), 4))


def test_chances_are_those_of_what_was_accepted() -> None:
    chances, rng = AcceptanceEstimate(), random.Random(3)
    judged(chances, 1, 0.8, 400, rng)
    judged(chances, 2, 0.1, 400, rng, grade=5)
    assert chances.cumulative(1, Draft([1] * 3, "x", 0)) == pytest.approx([0.8, 0.64, 0.51], abs=0.15)
    assert expected(chances.cumulative(2, Draft([1] * 3, "x", 5))) < 0.3
    assert chances.cumulative(3, Draft([1], "x", 0)) == pytest.approx([0.8], abs=0.15)  # as others of its kind


def test_a_sequence_has_chances_of_its_own() -> None:
    chances, rng = AcceptanceEstimate(), random.Random(4)
    judged(chances, 1, 0.95, 60, rng)
    judged(chances, 2, 0.0, 12, rng)
    assert chances.cumulative(1, Draft([1], "x", 0))[0] > 0.75
    assert chances.cumulative(2, Draft([1], "x", 0))[0] < 0.2
    chances.end(2)
    assert chances.cumulative(2, Draft([1], "x", 0))[0] > 0.2


def test_probes_become_seldom_while_they_bring_nothing() -> None:
    probe, made = Probe(), 0
    for _ in range(10_000):
        if probe.due():
            probe.begun()
            probe.made(False)
            made += 1
    assert made < 30
    for _ in range(LAST):
        probe.due()
    probe.begun()
    probe.made(True)
    assert not probe.due()


def test_what_drafts_gained_may_be_risked_and_nothing_else() -> None:
    allowance = Allowance()
    allowance.save(100_000)
    assert not allowance.allows(0.0), "no rest saves up for longer steps"
    for _ in range(4):
        allowance.settle(1, 1.0, 8)
    assert not allowance.allows(0.1), "it could be luck"
    allowance.settle(1, 1.0, 8)
    assert allowance.allows(15.0)
    assert allowance.trusts(1)
    assert not allowance.trusts(2), "a sequence has an account of its own"
    for _ in range(100):
        allowance.settle(2, 1.0, 8)
    lost = next(step for step in itertools.count(1) if allowance.settle(2, -8.0, 8) or not allowance.is_proven)
    assert lost < 6, "what paid long ago isn't lost for long"
    assert not allowance.trusts(2)
    allowance.end(1)
    assert not allowance.trusts(1)


def test_luck_is_not_taken_for_proof() -> None:
    """Drafts that stand so often that they would just pay if nobody felt longer steps."""
    seconds, rng = np.array([1.0, 1.2]), random.Random(1)
    allowance, proven = Allowance(), 0
    for _ in range(20_000):
        allowance.settle(1, (rng.random() < 0.2) - cost(seconds, 1, 1), 1)
        proven += allowance.is_proven
    assert proven < 100
    sure = Allowance()
    for _ in range(20):
        sure.settle(1, (rng.random() < 0.9) - cost(seconds, 1, 1), 1)
    assert sure.is_proven


def test_where_drafts_must_be_verified_to_be_judged_a_few_steps_are_lengthened_on_trial() -> None:
    allowance = Allowance(tries=True)
    assert allowance.is_new
    allowance.save(START)
    assert allowance.allows(0.5)
    allowance.charge(0.5)
    assert not allowance.allows(0.6), "half a step is left"
    allowance.save(10_000)
    assert allowance.allows(0.6)
    assert not allowance.allows(1.1), "a long rest saves up no burst of long steps"


def test_asking_those_who_bring_nothing_costs_next_to_nothing() -> None:
    asking, texts = CallEstimate(), [Written(seq, [1]) for seq in range(64)]
    for _ in range(50):
        asking.took(10, 10 * 50e-6)
    assert asking.chosen(texts, 10e-3) == texts  # nobody knows yet
    for text in texts * 100:
        asking.brought(text.seq, 0)
    before = asking.call_s
    asking.took(1, 1.0)
    assert asking.call_s < 1.5 * before, "a core that was lent meanwhile says nothing of a call"
    asked = sum(len(asking.chosen(texts, 10e-3)) for _ in range(1000))
    assert asked * 50e-6 < 0.01 * 1000 * 10e-3
    assert asked > 0
    for _ in range(20):
        asking.brought(5, 3)
    assert all(texts[5] in asking.chosen(texts, 10e-3) for _ in range(10))
    assert Written(99, [1], prediction=(3,)) in asking.chosen([*texts, Written(99, [1], prediction=(3,))], 10e-3)


@pytest.mark.parametrize("sequences", [1, 8])
def test_what_brings_nothing_takes_next_to_nothing_even_of_very_short_steps(sequences: int) -> None:
    looks, step_s = itertools.count(), 300e-6
    drafter = Drafter([Right()], lambda: 20e-6 * next(looks))  # each look at the clock takes 20 us
    texts = [Written(seq, [1]) for seq in range(sequences)]
    for step in range(3000):
        if step == 1000:
            begun = next(looks)
        drafts = drafter.plan(texts)
        drafter.observe(sequences + sum(len(draft.tokens) for draft in drafts.values()), 0, step_s)
        for text in texts:
            wrote(drafter, text, drafts.get(text.seq), [2])
    assert 4 < next(looks) - begun < 0.01 * 2000 * step_s / 20e-6  # and it is tried now and then
    late = Written(99, [1], prediction=(3,))
    drafter.plan([*texts, late])
    assert drafter.tally.proposed > 0
    proposed = drafter.tally.proposed
    drafter.plan([*texts, late, Written(100, [1], prediction=(3,))])
    assert drafter.tally.proposed > proposed, "a newcomer ends a rest"


def test_sequences_that_ended_leave_no_account() -> None:
    drafter = Drafter([Right()], lambda: 0.0, by_rejection=True)
    for batch in range(9):
        texts = [Written(batch * 99 + at, [1]) for at in range(MOST_ENDED + 1)]
        for _ in range(9):
            drafts = drafter.plan(texts)
            drafter.observe(len(texts) + sum(len(draft.tokens) for draft in drafts.values()), 0, 1e-3)
            for text in texts:
                wrote(drafter, text, drafts.get(text.seq), [1] * 40)
        for text in texts:
            drafter.end(text)
    assert drafts, "their last step had drafts"
    drafter.plan([])
    assert not drafter._allowance._own


class Right(Speculator):
    """Proposes ones; the model of these tests writes ones where ``right``."""

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        return Draft([1] * budget, "right", 0)

    def end(self, text: SequenceView) -> None:
        """Does nothing, because nothing is remembered."""


def driven(
    sequences: int, chance: float, steps: int, seed: int = 0, tries: bool = False, answer: int = 0
) -> tuple[float, float, list[int]]:
    """Tokens per second with speculation on a modelled machine, over those without; the last steps' mean depth;
    the steps with drafts. Each token is a one by ``chance``; ``answer`` tokens end an answer, and another begins.
    """
    drafter, rng, clock = Drafter([Right()], lambda: 0.0, by_rejection=tries), random.Random(seed), 0.0
    texts, tokens, depth, drafted = [Written(seq, [1]) for seq in range(sequences)], 0, 0.0, list[int]()
    for step in range(steps):
        drafts = drafter.plan(texts)
        rows = sequences + sum(len(draft.tokens) for draft in drafts.values())
        took = steep(rows) * rng.uniform(0.95, 1.05)
        clock += took
        drafter.observe(rows, 0, took)
        for text in texts:
            coming = [int(rng.random() < chance) for _ in range(MOST_DRAFTS + 1)]
            tokens += 1 + wrote(drafter, text, drafts.get(text.seq), coming)
            if answer and len(text.tokens) > answer:
                drafter.end(text)
        if answer:
            texts = [text if len(text.tokens) <= answer else Written(text.seq + sequences, [1]) for text in texts]
        if step >= steps // 2:
            depth += (rows - sequences) / sequences / (steps - steps // 2)
        if drafts:
            drafted.append(step)
    return tokens / clock / (sequences / steep(sequences)), depth, drafted


class Second(Speculator):
    """Proposes two tokens at each of two places; the model of these tests writes ones."""

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        return Draft.of_paths([[2, 1], [1, 2], [1, 1]], "second", 0)

    def end(self, text: SequenceView) -> None:
        """Does nothing, because nothing is remembered."""


@pytest.mark.parametrize("trees", [True, False])
def test_second_guesses_are_verified_where_they_are_the_right_ones(trees: bool) -> None:
    drafter, texts, last = Drafter([Second()], lambda: 0.0, trees=trees), [Written(1, [1])], list[list[list[int]]]()
    for step in range(600):
        drafts = drafter.plan(texts)
        drafter.observe(1 + sum(len(draft.tokens) for draft in drafts.values()), 0, steep(1))
        for draft in drafts.values():
            if step > 500:
                last.append([list(path) for path in draft.paths()])
        wrote(drafter, texts[0], drafts.get(1), [1] * 20)
    if not trees:
        assert drafter.tally.accepted == 0
        return
    assert [1, 1] in last[-1]
    assert drafter.tally.accepted > 800
    assert drafter.totals.accepted[1] <= drafter.totals.judged[1] <= drafter.totals.accepted[0]


@pytest.mark.parametrize("sequences", [1, 4, later(16)])
@pytest.mark.parametrize("chance", [0.0, 1 / 16])
def test_what_is_seldom_accepted_is_never_verified(sequences: int, chance: float) -> None:
    gain, _, drafted = driven(sequences, chance, 1500)
    assert gain > 0.99
    assert sequences < 4 or not drafted


def test_by_rejection_fewer_steps_are_lengthened_in_vain_than_a_99th_percentile_sees() -> None:
    gain, _, drafted = driven(8, 0.0, START + 800, tries=True)
    assert gain > 0.98
    assert len(drafted) > 0, "it is tried"
    assert sum(step >= START for step in drafted) < 8
    assert max(sum(at <= step < at + 320 for step in drafted) for at in range(START, 544)) < 4


@pytest.mark.parametrize(("sequences", "chance", "least"), [(1, 0.6, 1.9), (1, 0.9, 2.7), (2, 0.9, 1.7)])
def test_answers_of_a_hundred_tokens_gain_too(sequences: int, chance: float, least: float) -> None:
    gain, *_ = driven(sequences, chance, 1500, answer=100)
    assert gain > least


@pytest.mark.parametrize("sequences", [1, 4, later(16)])
@pytest.mark.parametrize("chance", [0.6, 0.9])
def test_the_learned_depth_is_nearly_as_good_as_the_best(sequences: int, chance: float) -> None:
    gain, *_ = driven(sequences, chance, 1500)
    best = max(
        sum(chance**at for at in range(depth + 1)) * steep(sequences) / steep(sequences * (depth + 1))
        for depth in range(17)
    )
    assert gain > 0.9 * best


def test_who_waits_for_no_verdict_is_asked_less_and_less() -> None:
    """A sampled answer's drafts, judged by rejection, are never compared with what is written."""
    drafter, text = Drafter([Right()], lambda: 0.0, by_rejection=True), Written(1, [1])
    drafter._allowance._saved = 0.0  # nothing may be risked now
    for _ in range(60):
        drafter._chances.judge(1, Draft([1] * 8, "right", 0), 8)  # they once stood
    for _ in range(200):
        assert not drafter.plan([text])
        drafter.observe(1, 0, steep(1))
        text.tokens.append(1)
    assert drafter._asking._brings[1] < 0.5


def test_a_sequence_that_ends_with_a_draft_leaves_no_account() -> None:
    drafter = Drafter([Right()], lambda: 0.0, by_rejection=True)
    for seq in range(1, 41):
        text = Written(seq, [1])
        for _ in range(4):
            drafts = drafter.plan([text])
            drafter.observe(1 + sum(len(draft.tokens) for draft in drafts.values()), 0, steep(1))
            wrote(drafter, text, drafts.get(seq), [1] * (MOST_DRAFTS + 1))
        drafter.end(text)
    assert drafter.tally.verified > 0
    assert not drafter._allowance._own.keys() - {text.seq}  # the last one's end waits for a call
    assert len(drafter._ended) == 1


def test_ended_answers_are_forgotten_also_where_nobody_is_asked_for_drafts() -> None:
    drafter = Drafter([Right()], lambda: 0.0)
    for seq in range(100):
        text = Written(seq, [1], draft_room=0)
        drafter.plan([text])
        drafter.end(text)
    assert len(drafter._ended) <= MOST_ENDED


def test_a_sequence_with_the_number_of_one_that_ended_begins_anew() -> None:
    look_up = PromptLookup()
    drafter, again = Drafter([look_up], lambda: 0.0), Written(1, [7, 8, 9, 7, 8])
    look_up.propose(before := Written(1, [1, 2, 3, 1, 2]), 4)
    drafter.end(before)
    drafter.observe(1, 0, steep(1))
    drafter.plan([again])
    assert (draft := look_up.propose(again, 2)) is not None
    assert list(draft.tokens) == [9, 7]
