"""Tests Jacobi iterations: what was chosen behind guesses comes back as drafts, and in time drafts are right."""

from __future__ import annotations

from baton.engine.speculate import lookahead
from baton.engine.speculate.draft import accepted
from baton.engine.speculate.lookahead import BLIND, ITERATED, MOST_NGRAMS, TWO_TOKENS, Lookahead
from tests.engine.speculate.texts import Written


def follow(tokens: list[int]) -> int:
    """Returns the next token of a model that depends on the last two; its texts repeat after 22 tokens."""
    return (3 * tokens[-1] + 5 * tokens[-2] + 1) % 23


def chosen(text: list[int], draft: list[int]) -> list[int]:
    return [follow([*text, *draft[:at]]) for at in range(len(draft) + 1)]


def test_without_any_iteration_it_guesses_blindly_and_learns_from_what_was_chosen() -> None:
    one, text = Lookahead(), Written(1, [4, 5])
    first = one.propose(text, 4)
    assert first is not None
    assert (len(first.tokens), first.grade) == (4, BLIND)
    told = chosen(text.tokens, list(first.tokens))
    one.verified(text, first.tokens, told)
    text.tokens += told[: accepted(first.tokens, told) + 1]
    second = one.propose(text, 4)
    assert second is not None
    assert second.grade != BLIND


def test_what_is_left_of_an_iteration_is_guessed_at_its_place() -> None:
    one, text = Lookahead(), Written(1, [4, 5])
    one.verified(text, [7, 8, 9], [20, 21, 22, 23])
    text.tokens += [20]
    draft = one.propose(text, 3)
    assert draft is not None
    assert (list(draft.tokens), draft.grade) == ([21, 22, 23], ITERATED)


def test_an_ngram_of_the_pool_goes_before_the_iteration_and_the_newest_counts() -> None:
    one, text = Lookahead(), Written(1, [4, 5])
    one.verified(text, [7, 8], [20, 30, 31])
    one.verified(text, [7, 8], [20, 40, 41])
    text.tokens += [60, 7, 8]
    draft = one.propose(text, 1)
    assert draft is not None
    assert (list(draft.tokens), draft.grade) == ([41], TWO_TOKENS)


def test_a_text_that_repeats_itself_is_soon_drafted_right() -> None:
    one, text, stood = Lookahead(), Written(1, [1, 0]), 0
    for _ in range(300):
        draft = one.propose(text, 4)
        assert draft is not None
        told = chosen(text.tokens, list(draft.tokens))
        count = accepted(draft.tokens, told)
        one.verified(text, draft.tokens, told)
        text.tokens += told[: count + 1]
        stood += count
    assert stood > 1000, "of 1,200 that were drafted"


def test_a_texts_pool_is_bounded_and_forgotten_with_it(monkeypatch) -> None:
    monkeypatch.setattr(lookahead, "MOST_NGRAMS", 10)
    one, text = Lookahead(), Written(1, [1, 2])
    for at in range(50):
        one.verified(text, [at, at + 1], [at + 2, at + 3, at + 4])
    assert len(one._known[1]._next) == 10 < MOST_NGRAMS
    one.end(text)
    assert not one._known
