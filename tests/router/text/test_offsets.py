"""Tests that tokens' offsets are places in the text, also of characters that lie in several tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.text.model import TextModel, load_text
from baton.router.text.offsets import TextOffsets, prompt_offsets

ODD = ["é", "漢字", "😀", "e\u0301", "\u200d", " a river", "\n"]


@pytest.fixture(scope="session")
def text(model_dir: Path) -> TextModel:
    return load_text(model_dir, 400)


@given(text=st.text(max_size=40), cuts=st.sets(st.integers(0, 160)), begin=st.integers(0, 9))
def test_a_token_begins_at_the_character_of_its_first_byte(text: str, cuts: set[int], begin: int) -> None:
    whole = text.encode()
    ends = sorted({c for c in cuts if c < len(whole)} | {0, len(whole)})
    pieces = [whole[a:b] for a, b in itertools.pairwise(ends)]
    offsets = TextOffsets(begin)
    places = [begin + len(whole[:at].decode(errors="ignore")) for at in ends[:-1]]
    assert [*offsets.of(pieces[:2]), *offsets.of(pieces[2:])] == places


@pytest.mark.parametrize("begins", [(), (0,)])
def test_a_prompts_offsets_count_what_its_text_spells(text: TextModel, begins: tuple[int, ...]) -> None:
    said = "".join(ODD)
    ids = text.tokenizer.encode(said, False)
    assert prompt_offsets(text.tokenizer, (*begins, *ids), said)[len(begins) :] == TextOffsets().of(
        [text.tokenizer.token_bytes(i) for i in ids]
    )
    special = text.tokenizer.token_bytes(1).decode()
    spelled = f"a{special}b"
    found = prompt_offsets(text.tokenizer, (*begins, *text.tokenizer.encode(spelled, False)), spelled)
    assert found[len(begins) :] == [0, 1, 1 + len(special)]
