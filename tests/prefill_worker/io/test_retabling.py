"""Blocks of one page made of blocks of several, and the reverse: each that the receiver lacks, once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.layout.page import layout_for
from baton.kv.layout.tables import by_window
from baton.kv.pages.tables import parts_of
from baton.prefill_worker.io.retabling import Retabling
from baton.protos.channel import ShipBlock
from baton.protos.nouns import LayerGroup

WHOLE = layout_for("float32", [LayerGroup("w", ("k", "v"), 5, 1, 4, 64), LayerGroup("f", ("k", "v"), 2, 1, 4)])
OWN = by_window(WHOLE)
TABLES = len(OWN.windows)


@given(tokens=st.integers(1, 400), seed=st.integers(0, 99), data=st.data())
@pytest.mark.parametrize("divides", [True, False])
def test_every_block_that_the_receiver_lacks_is_made_once_and_no_other_is_announced(
    divides: bool, tokens: int, seed: int, data: st.DataObject
) -> None:
    blocks = -(-tokens // 16)
    behind = sum(blocks - part.first for part in parts_of(OWN.windows, tokens, 16)) if divides else 0
    held = data.draw(st.integers(0, blocks))
    received = data.draw(st.sets(st.integers(0, blocks + behind - 1)))
    sides = (WHOLE, OWN) if divides else (OWN, WHOLE)
    mapping = Retabling(*sides, tokens, held, received)
    assert (mapping.blocks, mapping.tail_tokens) == (blocks + behind, tokens - (blocks - 1) * 16)
    leading, had = mapping.wanted()
    ours = range(blocks if divides else blocks * TABLES)
    order = [i for i in ours if i >= leading and i not in had]
    random.Random(seed).shuffle(order)
    made = [piece for i in order for piece in mapping.take(ShipBlock(i, 1000 + i, b"", 16))]
    assert sorted(piece.index for piece in made) == sorted(set(range(held, blocks + behind)) - received)
    for piece in made:
        if not divides:
            assert piece.pages == tuple(1000 + table * blocks + piece.index for table in range(TABLES))
            continue
        part = next((p for p in parts_of(OWN.windows, tokens, 16)[::-1] if piece.index >= p.at), None)
        table, block = (0, piece.index) if part is None else (part.number, piece.index - part.at + part.first)
        assert (piece.pages, piece.table) == ((1000 + block,), table)
    assert not mapping._pages, "pages are remembered that nobody needs"
    assert len(order) * (1 if divides else 1 / TABLES) <= len(made), "nothing is announced that makes no block"
