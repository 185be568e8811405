"""Parts of pages: every layer and head lies in one of them, and what isn't a partition is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.layout.extents import (
    common,
    contiguous,
    gather,
    part_bytes,
    part_of,
    require_part,
    require_whole,
    scatter,
    without,
)
from baton.kv.layout.page import in_pages_of, layout_for
from baton.protos.errors import LayoutMismatch
from baton.protos.nouns import Extent, LayerGroup

GROUPS = (LayerGroup("full", ("k", "v"), 3, 4, 8), LayerGroup("windowed", ("k", "v"), 2, 2, 4, 16))


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "fp8_e4m3"]),
    tokens=st.sampled_from([16, 48]),
    layers=st.integers(0, 5),
    heads=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_parts_by_layers_or_heads_are_the_whole_page_whatever_its_dtype(dtype, tokens, layers, heads, seed):
    layout = in_pages_of(layout_for(dtype, GROUPS), tokens)
    counts = [4, 4, 4, 2, 2]
    if heads:
        owned = [{at: (0, n // 2) for at, n in enumerate(counts)}, {at: (n // 2, n) for at, n in enumerate(counts)}]
    else:
        owned = [{at: (0, counts[at]) for at in side} for side in (range(layers), range(layers, 5))]
    parts = tuple(part for part in (part_of(layout, each) for each in owned) if part)
    require_whole(parts, layout.page_bytes)
    page = np.random.default_rng(seed).integers(0, 256, layout.page_bytes, np.uint8)
    landed = np.zeros_like(page)
    for part in parts:
        wire = gather(memoryview(page), part)
        assert len(wire) == part_bytes(part)
        scatter(wire, memoryview(landed), part)
    assert (landed == page).all()


def test_layers_in_a_row_are_one_extent_and_sent_without_a_copy():
    layout = layout_for("float32", 4, 2, 8)
    part = part_of(layout, {2: (0, 2), 3: (0, 2)})
    page = memoryview(bytearray(layout.page_bytes))
    view = contiguous(page, part)
    assert view is not None
    assert view.nbytes == layout.page_bytes // 2
    view[0] = 7
    assert page[layout.page_bytes // 2] == 7


@pytest.mark.parametrize(
    "part",
    [
        (),
        (Extent(0, 0, 0, 1),),
        (Extent(0, 8, 0, 0),),
        (Extent(-8, 8, 0, 1),),
        (Extent(60, 8, 0, 1),),
        (Extent(0, 8, 4, 2),),
        (Extent(0, 8, 32, 3),),
        (Extent(0, 8, 1 << 62, 1 << 62),),
        (Extent(0, 8, 0, 1), Extent(4, 8, 0, 1)),
        (Extent(0, 8, 16, 2), Extent(16, 8, 0, 1)),
    ],
    ids=str,
)
def test_a_part_that_lies_beyond_the_page_or_on_itself_is_refused(part):
    with pytest.raises(LayoutMismatch):
        require_part(part, 64)


@pytest.mark.parametrize(
    "extent", [Extent(0, 64, 4096, 64), Extent(1 << 40, 8, 0, 1), Extent(0, 65, 0, 1)], ids=str
)
def test_nothing_is_counted_of_a_part_that_is_not_of_the_page(extent):
    page = (Extent(0, 64, 0, 1),)
    for counted in (lambda: common(page, (extent,), 64), lambda: without(page, ((extent,),), 64)):
        with pytest.raises(LayoutMismatch):
            counted()


def test_parts_that_overlap_or_leave_a_gap_are_no_page():
    first, second = (Extent(0, 32, 0, 1),), (Extent(32, 32, 0, 1),)
    require_whole((first, second), 64)
    for wrong in (
        ((first, first)),
        ((first,)),
        ((first, (Extent(32, 31, 0, 1),))),
        ((first, (Extent(31, 33, 0, 1),))),
    ):
        with pytest.raises(LayoutMismatch, match="part"):
            require_whole(wrong, 64)
