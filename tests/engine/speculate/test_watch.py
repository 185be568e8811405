"""Drafts that are compared with what was written without them are judged as if they had been verified."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.speculate.draft import Draft
from baton.engine.speculate.tree import depths
from baton.engine.speculate.watch import AGREED, DraftVerdict, Watch, Watches

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_what_is_written_judges_a_draft_as_its_verification_would(
    paths: list[list[int]], coming: list[int]
) -> None:
    draft = Draft.of_paths(paths, "x", 0)
    deep = depths(draft.parents) if draft.parents else range(len(draft.tokens))
    stood = draft.stands([coming[0], *(coming[depth + 1] for depth in deep)])
    watches, text = Watches(), [7, 7]
    watches.begin(1, Watch(draft, 2, 99, range(2), 0.5))
    verdict = None
    for token in coming:
        assert verdict is None
        text.append(token)
        if (verdict := watches.verdict(1, text)) is not None:
            break
    assert verdict is not None, "it ends where the draft does"
    assert list(verdict.rows) == list(stood)
    assert not verdict.unseen
    assert verdict.brought == sum(row in (1, 2) for row in stood)
    assert 1 not in watches


def test_no_more_is_waited_for_than_is_needed_and_nothing_is_said_of_the_rest() -> None:
    for draft in (Draft([1, 2, 3, 4], "x", 0), Draft.of_paths([[1, 2, 3, 4], [1, 5]], "x", 0)):
        watches = Watches()
        watches.begin(1, Watch(draft, 1, 2))
        assert watches.verdict(1, [9]) is None
        assert watches.verdict(1, [9, 1]) is None
        assert not watches.agrees(1, 2)
        assert watches.agrees(1, 1 + AGREED)
        verdict = watches.verdict(1, [9, 1, 2])
        assert verdict is not None
        assert list(verdict.rows) == [0, 1, 2]
        assert [draft.tokens[node] for node in verdict.unseen] == [3, 4]


def test_one_draft_of_a_sequence_is_watched_at_a_time() -> None:
    watches = Watches()
    watches.begin(1, Watch(Draft([1], "first", 0), 0, 1))
    watches.begin(1, Watch(Draft([2], "second", 0), 0, 1))
    verdict = watches.verdict(1, [1])
    assert verdict is not None
    assert verdict.watch.draft.source == "first"


def test_at_a_texts_end_what_is_there_is_judged() -> None:
    watches = Watches()
    watches.begin(1, Watch(Draft([1, 2, 3], "x", 0), 0, 3))
    assert watches.verdict(1, [1, 2]) is None
    verdict = watches.verdict(1, [1, 2], is_last=True)
    assert verdict is not None
    assert (list(verdict.rows), list(verdict.unseen)) == ([0, 1, 2], [2])
    assert 1 not in watches


def test_what_is_left_of_a_draft_that_stood_is_watched_where_the_next_step_would_begin() -> None:
    draft = Draft([1, 2, 3, 4, 5, 6], "x", 0)
    watch = Watch(draft, 10, 4, range(2), 0.5, sequences=3, is_weighed=True)
    rest = DraftVerdict(watch, range(5), ()).rest()
    assert rest is not None
    assert (list(rest.draft.tokens), rest.at, rest.sequences) == ([4, 5, 6], 13, 3)  # two drafts and the step's own
    assert rest.is_rest
    assert not rest.is_weighed
    wrong = DraftVerdict(watch, range(2), ()).rest()
    assert wrong is not None
    assert (list(wrong.draft.tokens), wrong.at) == ([3, 4, 5, 6], 12)  # behind the token that was wrong
    assert DraftVerdict(watch, range(1), ()).rest() is None, "nothing stood"
    assert DraftVerdict(watch._replace(nodes=range(4)), range(5), ()).rest() is None, "one token is left"
