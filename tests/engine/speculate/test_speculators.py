"""Tests what is proposed by look-up and by suffix: the continuation of what stood there before, and nobody
else's.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.engine.speculate import prompt_lookup, suffix
from baton.engine.speculate.draft import GRADES, Speculator, accepted, graded
from baton.engine.speculate.names import AUTO, NONE, placed, speculator_names, speculators, without_auto
from baton.engine.speculate.prompt_lookup import PromptLookup
from baton.engine.speculate.suffix import Suffix
from baton.protos.errors import ConfigError
from tests.engine.speculate.texts import Written

LOOK_UPS = (prompt_lookup.NAME, suffix.NAME)


def settled(speculator: Speculator, text: Written, budget: int = 4) -> list[int]:
    """Returns what is proposed after a long text was read in."""
    for _ in range(200):
        draft = speculator.propose(text, budget)
    return list(draft.tokens) if draft else []


@pytest.mark.parametrize("name", LOOK_UPS)
def test_what_followed_the_last_tokens_is_proposed(name: str) -> None:
    (speculator,) = speculators(name)
    assert settled(speculator, Written(1, [5, 6, 7, 8, 9, 1, 2, 5, 6])) == [7, 8, 9, 1]


@pytest.mark.parametrize("name", LOOK_UPS)
def test_the_longest_match_wins(name: str) -> None:
    (speculator,) = speculators(name)
    assert settled(speculator, Written(1, [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]), 1) == [4]


@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_text_that_repeats_itself_goes_on_repeating(name: str) -> None:
    (speculator,) = speculators(name)
    assert settled(speculator, Written(1, [9, 1, 2, 3, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("name", LOOK_UPS)
def test_nothing_is_proposed_for_what_is_new(name: str) -> None:
    (speculator,) = speculators(name)
    assert settled(speculator, Written(1, list(range(40)))) == []
    assert settled(speculator, Written(2, [3])) == []


@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_text_half_way_is_seen_as_one_known_from_its_start(name: str) -> None:
    rng = random.Random(4)
    tokens = rng.choices(range(6), k=700)
    (early,), (late,) = speculators(name), speculators(name)
    text = Written(1, tokens[:300])
    for token in tokens[300:]:
        early.propose(text, 4)
        text.tokens.append(token)
    assert settled(early, text) == settled(late, Written(1, tokens))


def test_a_prediction_is_looked_in_from_the_answers_first_token() -> None:
    predicted = (50, 51, 52, 53, 54)
    text = Written(1, [1, 2, 3], prompt=3, prediction=predicted)
    lookup = PromptLookup()
    assert settled(lookup, text, 3) == [50, 51, 52]
    text.tokens += [50, 51]
    assert settled(lookup, text, 3) == [52, 53, 54]
    text.tokens += [99, 52, 53]
    assert settled(lookup, text, 3) == [54]
    (other := Written(2, [1, 2, 3], prompt=3, prediction=predicted)).tokens.append(7)
    assert settled(lookup, other, 3) == []


def answered(speculator: Suffix, answer: list[int], tenant: bytes = b"") -> None:
    speculator.end(Written(99, [1, 2, *answer], prompt=2, tenant=tenant))
    speculator.corpus.read(4 * len(answer) + 8)


def test_another_answer_of_the_same_tenant_is_looked_in() -> None:
    suffix = Suffix()
    answered(suffix, [10, 11, 12, 13], tenant=b"a")
    assert settled(suffix, Written(1, [7, 10, 11], tenant=b"a")) == [12, 13]
    assert settled(suffix, Written(2, [7, 10, 11], tenant=b"b")) == []
    assert settled(suffix, Written(3, [7, 1, 2], tenant=b"a")) == []  # a prompt is nobody else's


def test_what_followed_several_places_is_proposed_as_a_tree_where_trees_are_verified() -> None:
    tokens = [8, 1, 2, 3, 4, 5, 1, 2, 6, 7, 9, 9, 1, 2, 3, 5, 0, 8, 1, 2]
    chain, tree = prompt_lookup.PromptLookup(), prompt_lookup.PromptLookup()
    tree.branches = True
    plain, several = (one.propose(Written(1, list(tokens)), 3) for one in (chain, tree))
    assert plain is not None
    assert several is not None
    assert (list(plain.tokens), plain.parents) == ([3, 4, 5], ())  # behind the longest match, three tokens
    assert several.paths() == [[3], [3, 4], [3, 4, 5], [6], [6, 7], [6, 7, 9]]
    assert several.chain() == plain
    one = tree.propose(Written(2, [1, 2, 3, 1, 2]), 2)
    assert one is not None
    assert (list(one.tokens), one.parents) == ([3, 1], ())  # there is one place alone


def test_longer_matches_have_higher_grades() -> None:
    grades = [graded(length) for length in range(2, 60)]
    assert grades == sorted(grades)
    assert (grades[0], grades[-1]) == (0, GRADES - 1)


def test_drafts_stand_up_to_the_first_that_is_wrong() -> None:
    assert accepted([1, 2, 3], [1, 2, 3]) == 3
    assert accepted([1, 2, 3], [1, 9, 3]) == 1
    assert accepted([1, 2, 3], []) == 0


def test_names_are_joined_and_unknown_ones_list_the_choices() -> None:
    assert speculators(NONE) == ()
    assert len(speculators(AUTO)) == len(speculators("auto+suffix")) == 3
    assert len(speculators("suffix+prompt_lookup+suffix")) == 2
    assert speculator_names("auto+draft:some/model") == (*speculator_names(AUTO), "draft:some/model")
    with pytest.raises(
        ConfigError, match="none, auto, prompt_lookup, suffix, forced, lookahead, self, draft:MODEL"
    ) as found:
        speculators("suffix+magic")
    assert found.value.param == "speculation"
    for wrong in ("draft:", "none+suffix", ""):
        with pytest.raises(ConfigError, match="choose from"):
            speculator_names(wrong)


def test_auto_stays_what_it_is_until_the_worker_knows_its_model(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    assert [placed(asked) for asked in (AUTO, NONE, "auto+suffix")] == [AUTO, NONE, "auto+suffix"]
    assert placed(f"auto+draft:{tmp_path}/./draft/../draft") == f"auto+draft:{tmp_path}/draft"
    assert [without_auto(asked) for asked in (AUTO, NONE, "auto+suffix")] == [NONE, NONE, "suffix"]
    with pytest.raises(ConfigError, match="magic"):
        placed("auto+magic")


def test_one_call_finds_what_a_prompt_of_hundreds_of_tokens_has() -> None:
    """Calls are few until drafts have paid, and the next answer has another prompt."""
    draft = prompt_lookup.PromptLookup().propose(Written(1, [*range(400), 320, 321]), 4)
    assert draft is not None
    assert list(draft.tokens) == [322, 323, 324, 325]
