"""Halves of surrogate pairs in what a model wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.text.surrogates import whole_pairs


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        (r'"\uDE00 and \uD83D\uDE00"', "\ufffd and \U0001f600"),
        (r'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (r'"a backslash \\ud83d"', r"a backslash \ud83d"),
        (r'"\\\ud83d"', "\\\ufffd"),
        (r'"\u00e4"', "\u00e4"),
    ],
)
def test_half_a_pair_becomes_one_replacement_character(text: str, whole: object) -> None:
    assert json.loads(whole_pairs(text)) == whole


@given(st.text(alphabet=st.characters(), max_size=30).map(json.dumps))
def test_every_text_can_be_sent_and_valid_text_stays_as_it_is(text: str) -> None:
    found = json.loads(whole_pairs(text))
    found.encode()
    try:
        json.loads(text).encode()
    except UnicodeEncodeError:
        return
    assert whole_pairs(text) == text
