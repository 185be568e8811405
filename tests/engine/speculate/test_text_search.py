"""Tests that searches of texts as strings find what is really there, in bounded work and memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.speculate.corpus import MOST_TENANTS, MOST_TOKENS, OF_TENANT, Corpus
from baton.engine.speculate.text_search import (
    GAP,
    LONGEST,
    PAIR,
    TRIED,
    Match,
    SearchableText,
    following,
    longest,
    places,
    spelled,
)

TEXTS = st.lists(st.integers(0, 2), min_size=3, max_size=60)
LARGEST = 0x10FFFE


def common(tokens: list[int], end: int, tail: list[int]) -> int:
    """How many tokens before ``end`` equal the last of ``tail``."""
    count = 0
    while count < min(end, len(tail), LONGEST) and tokens[end - 1 - count] == tail[-1 - count]:
        count += 1
    return count


@given(TEXTS, st.integers(0, 40))
def test_matches_are_the_latest_places_where_the_last_pair_stood_before(tokens: list[int], read: int) -> None:
    known = SearchableText(tokens)
    known.catch_up(read)
    known.catch_up(len(tokens))
    ends = [end for end in range(len(tokens) - 1, 1, -1) if common(tokens, end, tokens) >= PAIR]
    wanted = [Match(known.text, end, common(tokens, end, tokens)) for end in ends][:TRIED]
    found = known.matches()
    assert found == wanted[: len(found)]
    assert len(found) == len(wanted) or found[-1].length == LONGEST


@given(TEXTS, TEXTS, st.integers(2, 6))
def test_another_texts_longest_match_is_found_among_its_latest(
    text: list[int], tail: list[int], anchor: int
) -> None:
    ends = [end for end in range(len(text), 0, -1) if common(text, end, tail) >= anchor][:TRIED]
    held = spelled(text)
    found = [Match(held, end, common(text, end, tail)) for end in ends]
    best = max(found, key=lambda one: one.length, default=None)
    assert longest(places(held, spelled(tail), anchor, len(text))) == best


def test_a_token_of_any_id_is_one_character_and_comes_back() -> None:
    tokens = [0, 255, 0xD800, 0xDFFF, 0x10000, LARGEST]  # surrogates are characters like others
    assert len(spelled(tokens)) == len(tokens)
    assert following(Match(spelled(tokens) + GAP + "x", 0, 2), 9) == tokens
    assert [match.end for match in places(spelled(tokens * 2), spelled(tokens), 6, 12)] == [12, 6]


def test_what_follows_goes_on_periodically_past_the_end() -> None:
    assert following(Match(spelled([9, 1, 2, 3]), 1, 2), 7) == [1, 2, 3, 1, 2, 3, 1]
    assert following(Match(spelled([9]), 1, 2), 7) == []


def test_a_text_of_equal_tokens_is_compared_with_one_place() -> None:
    known = SearchableText([5] * 200)
    known.catch_up(200)
    assert [match.length for match in known.matches()] == [LONGEST]


def test_a_text_that_is_read_in_part_is_searched_in_that_part() -> None:
    known = SearchableText([1, 2, 3, 4, 9, 9, 9, 1, 2])
    known.catch_up(5)
    assert known.behind == 4
    assert known.matches() == [Match(known.text, 2, 2)]


def test_the_corpus_keeps_its_ceiling_and_the_latest_answers() -> None:
    corpus, rng = Corpus(of_tenant=400, most=900), random.Random(1)
    for tenant in range(12):
        name = b"%d" % tenant
        for _ in range(30):
            corpus.take(name, answer := rng.choices(range(1000), k=25))
            corpus.read(200)
            assert corpus.tokens <= 900
            assert corpus.tokens == corpus.waiting + sum(corpus.held(b"%d" % one) for one in range(12))
            assert corpus.held(name) <= 400
        found = corpus.match(name, spelled(answer[:20]))
        assert found is not None
        assert following(found, 99) == answer[20:]
    assert not corpus.held(b"0")


def test_a_corpus_reads_a_limited_number_of_tokens_at_a_time() -> None:
    corpus, calls = Corpus(), 0
    corpus.take(b"", list(range(3000)))
    while corpus.waiting:
        before, calls = corpus.waiting, calls + 1
        corpus.read(512)
        assert before - corpus.waiting <= 512
    assert calls == 6
    assert corpus.match(b"", spelled([2500, 2501, 2502, 2503])) is not None


def test_more_than_can_wait_is_dropped() -> None:
    corpus = Corpus()
    for _ in range(100):
        corpus.take(b"", range(1000))
    assert corpus.tokens < 70_000


def test_tenants_of_short_answers_are_forgotten_beyond_a_number() -> None:
    corpus = Corpus()
    for tenant in range(2 * MOST_TENANTS):
        corpus.take(b"%d" % tenant, [7, 8, 9, 7, 8, 9, 7])
        while corpus.waiting:
            corpus.read(2048)
    tail = spelled([7, 8, 9])
    kept = [corpus.match(b"%d" % tenant, tail) is not None for tenant in range(2 * MOST_TENANTS)]
    assert kept == [False] * MOST_TENANTS + [True] * MOST_TENANTS
    assert corpus.tokens == 8 * MOST_TENANTS


@pytest.mark.parametrize("vocabulary", [250, 150_000])
def test_a_full_corpus_of_many_tenants_takes_little_memory(vocabulary: int) -> None:
    rng = random.Random(3)
    answer = rng.choices(range(vocabulary), k=4000)
    tracemalloc.start()
    try:
        corpus = Corpus()
        for tenant in range(20):
            for _ in range(20):
                corpus.take(b"%d" % tenant, answer)
                while corpus.waiting:
                    corpus.read(2048)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert MOST_TOKENS - OF_TENANT < corpus.tokens <= MOST_TOKENS
    assert taken < 4.5 * MOST_TOKENS
