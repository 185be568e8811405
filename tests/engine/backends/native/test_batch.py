"""The arrays of a step: what rows ask for, what their views show, and which tokens the step has written."""

from __future__ import annotations

import numpy as np

from baton.engine.backends.native.batch import NativeBatch
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.protos.nouns import Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=4)


def item(
    seq: int, count: int, sampling: Sampling | None, targets: tuple[int, ...] = (), drafts: int = 0
) -> SequenceStep:
    tokens = list(range(5, 5 + count))
    spec = None if sampling is None else SampleSpec(sampling, 0, count, tokens, 1)
    verify = () if spec is None else (spec,) * drafts
    return SequenceStep(seq, tokens, 0, [seq, seq + 1], spec, targets=targets, verify=verify)


def batch(*items: SequenceStep) -> NativeBatch:
    return NativeBatch(StepPlan(items), vocab_size=50, pages=20)


def test_greedy_rows_need_no_logits_and_the_chosen_tokens_are_those_that_the_step_wrote() -> None:
    made = batch(item(1, 3, GREEDY), item(2, 17, None), item(4, 1, GREEDY))
    assert (made.rows, made.item_count, made.wanted_count) == (21, 3, 2)
    assert made.wanted.tolist() == [2, 20]
    assert (made.loud, len(made.logits), made.scored) == ({}, 0, [])
    assert [seq for seq, _ in made.sampled] == [1, 4]
    made.choices["token"] = [7, -1]
    assert made.chosen() == [7, -1]
    assert made.tokens.tolist() == [*range(5, 8), *range(5, 22), 5]


def test_a_step_that_chooses_nothing_has_no_tokens() -> None:
    made = batch(item(1, 3, None))
    assert (made.chosen(), made.wanted_count) == ([], 0)


def test_rows_with_logprobs_and_scored_rows_get_logits_of_their_own() -> None:
    asked = Sampling(temperature=0.0, max_tokens=4, logprobs=2)
    made = batch(item(1, 2, GREEDY), item(2, 3, asked, targets=(6, 7)), item(3, 1, Sampling(temperature=0.7)))
    assert made.wanted.tolist() == [1, 4, 5, 2, 3]
    assert made.loud == {1: 0, 3: 1, 4: 2}
    assert made.logits.shape == (3, 50)
    at = made.logits.ctypes.data
    assert made.choices["logits"].tolist() == [0, at, 0, at + 200, at + 400]
    assert made.choices["temperature"].tolist() == np.array([0, 0, 0.7, 0, 0], np.float32).tolist()
    assert [each.seq for each in made.scored] == [2]


def test_drafts_are_asked_for_behind_the_last_known_row() -> None:
    made = batch(item(1, 4, GREEDY, drafts=2))
    assert made.wanted.tolist() == [1, 2, 3]
    assert [seq for seq, _ in made.sampled] == [1, 1, 1]
