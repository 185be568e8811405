"""The suffix automaton beside the obvious way: looking through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.speculate.automaton import FOLLOWED, NONE, SuffixAutomaton
from baton.engine.speculate.corpus import Corpus

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def ends(text: list[int], part: list[int]) -> set[int]:
    """Behind which places ``part`` occurs."""
    return {at for at in range(len(part), len(text) + 1) if text[at - len(part) : at] == part}


@given(TEXTS, st.lists(st.integers(0, 4), max_size=8))
def test_it_accepts_exactly_the_substrings(text: list[int], part: list[int]) -> None:
    automaton, state = SuffixAutomaton(text), 0
    for token in part:
        state = automaton.step(state, token) if state != NONE else NONE
    assert (state != NONE) == bool(ends(text, part) or not part)
    assert automaton.states <= max(1, 2 * len(text))
    if part and state != NONE:
        assert automaton.end(state) in ends(text, part)


@given(TEXTS)
def test_after_each_token_it_knows_the_longest_end_that_was_there_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        automaton.append(token)
        end, length = automaton.earlier
        part, read = text[count - length : count], text[:count]
        longest = max((n for n in range(count) if ends(read[:-1], read[count - n :])), default=0)
        assert length == longest
        assert not length or end in ends(read[:-1], part)


@given(TEXTS, st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_following_a_text_finds_its_longest_known_end_though_the_automaton_grows(
    text: list[int], asked: list[tuple[int, bool]]
) -> None:
    automaton, seen, state, length = SuffixAutomaton(text), list[int](), 0, 0
    for token, grows in asked:
        if grows:
            automaton.append(token)
        state, length = automaton.follow(state, length, token)
        seen.append(token)
        known = max(n for n in range(len(seen) + 1) if n == 0 or ends(automaton.tokens, seen[-n:]))
        assert length <= known
        if not any(grown for _, grown in asked):
            assert length == known
        if length:
            assert automaton.end(state) in ends(automaton.tokens, seen[len(seen) - length :])


class Counted(SuffixAutomaton):
    """Counts the transitions that are looked at."""

    looks = 0

    def step(self, state: int, token: int) -> int:
        Counted.looks += 1
        return super().step(state, token)


def test_no_piece_of_an_insertion_is_long_and_the_text_may_be_read_between_them() -> None:
    """The token after a long run has as many suffixes to give a transition as the run has tokens."""
    run, whole = [1] * 3000, SuffixAutomaton([1] * 3000 + [2, 1, 1, 2])
    automaton, most, pieces = Counted(run), 0, 0
    for token in (2, 1, 1, 2):
        Counted.looks, piece = 0, automaton.insertion(token)
        while next(piece, automaton) is None:
            most, pieces = max(most, Counted.looks), pieces + 1
            assert automaton.follow(0, 0, 1)[1] == 1
            assert automaton.follow(*automaton.follow(0, 0, 1), 2)[1] <= 2
            Counted.looks = 0
    assert pieces > 3000
    assert most <= 3
    assert (automaton.states, automaton.earlier) == (whole.states, whole.earlier)


def test_a_match_that_breaks_off_is_followed_by_a_limited_number_of_links() -> None:
    automaton = Counted([*([1] * 3000), 2])
    state, length = 0, 0
    for _ in range(3000):
        state, length = automaton.follow(state, length, 1)
    assert length == 3000
    Counted.looks = 0
    assert automaton.follow(state, length, 7) == (0, 0)
    assert Counted.looks <= FOLLOWED + 2


def test_a_corpus_reads_a_limited_number_of_pieces_at_a_time() -> None:
    corpus, calls = Corpus(), 0
    corpus.take(b"", [1] * 500 + [2] + [3] * 500)
    while corpus.waiting:
        before, calls = corpus.waiting, calls + 1
        corpus.read(8)
        assert before - corpus.waiting <= 8
    assert calls > 2 * 1000 // 8
