"""Blocks of one size made of blocks of another: each of the receiver's once, of the right tokens, and no other."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.layout.page import in_pages_of, layout_for
from baton.kv.layout.repaging import Repaging
from baton.protos.channel import ShipBlock
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout

SIZES = st.integers(1, 6).map(lambda runs: 16 * runs)
ONE = layout_for("float32", 1, 2, 8)


def of(block_tokens: int) -> KvLayout:
    return in_pages_of(ONE, block_tokens)


def announced(repaging: Repaging, ours: int, tokens: int) -> list[int]:
    """The sender's blocks that it will announce."""
    held, received = repaging.wanted()
    return [i for i in range(-(-tokens // ours)) if i >= held and i not in received]


@given(ours=SIZES, theirs=SIZES, tokens=st.integers(1, 700), seed=st.integers(0, 99), data=st.data())
def test_every_block_that_the_receiver_lacks_is_made_once_of_its_own_tokens(
    ours: int, theirs: int, tokens: int, seed: int, data: st.DataObject
) -> None:
    blocks = -(-tokens // theirs)
    held = data.draw(st.integers(0, blocks))
    received = data.draw(st.sets(st.integers(0, blocks - 1)))
    repaging = Repaging(of(ours), of(theirs), tokens, held, received)
    assert (repaging.blocks, repaging.tail_tokens) == (blocks, tokens - (blocks - 1) * theirs)
    order = announced(repaging, ours, tokens)
    random.Random(seed).shuffle(order)
    made: dict[int, list[int]] = {}
    for index in order:
        for piece in repaging.take(ShipBlock(index, 1000 + index, b"", ours)):
            assert piece.index not in made
            made[piece.index] = [(page - 1000) * ours + run * 16 for page, run in piece.runs]
    lacking = set(range(held, blocks)) - received
    assert made == {i: list(range(i * theirs, min((i + 1) * theirs, tokens), 16)) for i in lacking}
    assert not repaging._pages, "pages are remembered that nobody needs"


@given(ours=SIZES, theirs=SIZES, tokens=st.integers(1, 400), data=st.data())
def test_no_block_is_announced_of_which_the_receiver_needs_nothing(
    ours: int, theirs: int, tokens: int, data: st.DataObject
) -> None:
    received = data.draw(st.sets(st.integers(0, -(-tokens // theirs) - 1)))
    repaging = Repaging(of(ours), of(theirs), tokens, 0, received)
    for index in announced(repaging, ours, tokens):
        covered = range(index * ours // theirs, (min((index + 1) * ours, tokens) - 1) // theirs + 1)
        assert not received.issuperset(covered)


@pytest.mark.parametrize("size", [0, 8, 24, -16])
def test_pages_that_are_no_runs_of_16_are_refused_by_name(size: int) -> None:
    with pytest.raises(ConfigError, match=f"a page of {size} tokens can't be made: take a multiple of 16"):
        in_pages_of(ONE, size)


def test_a_page_of_more_tokens_is_runs_in_a_row() -> None:
    wide = in_pages_of(ONE, 48)
    assert (wide.page_bytes, wide.runs, wide.run_bytes) == (3 * ONE.page_bytes, 3, ONE.page_bytes)
    assert in_pages_of(wide, 16) == ONE
    assert msgspec.structs.replace(ONE, block_tokens=0).run_bytes > 0, "a peer's nonsense divides by nothing"
