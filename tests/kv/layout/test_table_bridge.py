"""Blocks between pages of all layers and pages of one table each: the same layers' bytes, in both directions."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from baton.kv.layout.bridge import bridge, can_ship, runs_of, with_codec
from baton.kv.layout.page import in_pages_of, layout_for
from baton.kv.layout.table_bridge import TableBridge, ranges_of
from baton.kv.layout.tables import by_window, table_count, undivided
from baton.protos.errors import LayoutMismatch
from baton.protos.nouns import KvLayout, LayerGroup


def whole_of(dtype: str, windowed: int, full: int, last: bool = False, block_tokens: int = 16) -> KvLayout:
    """Layers with a window, and layers that see all before or (``last``) behind them."""
    groups = LayerGroup("window", ("k", "v"), windowed, 2, 8, 64), LayerGroup("full", ("k", "v"), full, 2, 8)
    return in_pages_of(layout_for(dtype, groups if last else groups[::-1]), block_tokens)


def divided_of(whole: KvLayout) -> KvLayout:
    return in_pages_of(by_window(in_pages_of(whole, 16)), whole.block_tokens)


def page_of(layout: KvLayout, seed: int = 1) -> memoryview:
    values = np.random.default_rng(seed).standard_normal(layout.page_bytes // 4).astype(np.float32)
    return memoryview(values.tobytes())


SHAPES = [(5, 1), (5, 2), (4, 2), (7, 3)]


@pytest.mark.parametrize("block_tokens", [16, 48])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("windowed", "full"), SHAPES)
def test_what_is_divided_and_joined_again_is_the_same(
    windowed: int, full: int, last: bool, block_tokens: int
) -> None:
    whole = whole_of("float32", windowed, full, last, block_tokens)
    divided = divided_of(whole)
    assert undivided(divided, whole) == whole
    apart, together = TableBridge(whole, divided), TableBridge(divided, whole)
    page = page_of(whole)
    parts = [apart.part(page, 7, table) for table in range(table_count(divided))]
    assert {len(part) for part in parts} == {divided.page_bytes} == {apart.unit}
    assert bytes(together.joined(parts)) == bytes(page)
    assert together.unit == whole.page_bytes


@pytest.mark.parametrize(("windowed", "full"), SHAPES)
def test_ranges_cover_every_layer_once(windowed: int, full: int) -> None:
    whole = whole_of("float32", windowed, full)
    found = sorted(ranges_of(whole, divided_of(whole)))
    assert found[0][0] == 0
    assert all(at + size == after for (at, size), (after, _) in pairwise(found))
    assert sum(found[-1]) == whole.run_bytes


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_narrower_dtype_is_converted_on_the_way(block_tokens: int) -> None:
    wide, narrow = (whole_of(dtype, 5, 2, block_tokens=block_tokens) for dtype in ("float32", "bfloat16"))
    converter = bridge(wide, narrow)
    assert converter is not None
    page = page_of(wide)
    expected = bytes(converter.convert(page))
    apart = TableBridge(wide, divided_of(narrow))
    parts = [apart.part(page, 7, table) for table in range(table_count(apart.receiver))]
    assert bytes(TableBridge(divided_of(narrow), narrow).joined(parts)) == expected
    other = page_of(wide, seed=2)
    assert bytes(apart.part(other, 8, 0)) != bytes(parts[0]), "another page is converted anew"
    sent = TableBridge(wide, divided_of(wide))
    tables = [sent.part(page, 7, table) for table in range(table_count(sent.receiver))]
    assert bytes(TableBridge(divided_of(wide), narrow).joined(tables)) == expected


def test_whole_blocks_are_coded_for_a_receiver_with_a_codec() -> None:
    whole = whole_of("float32", 5, 2)
    coded = with_codec(whole, "int8")
    converter = bridge(whole, coded)
    assert converter is not None
    page, apart = page_of(whole), TableBridge(whole, divided_of(whole))
    tables = [apart.part(page, 1, table) for table in range(table_count(apart.receiver))]
    sent = TableBridge(divided_of(whole), coded)
    assert bytes(sent.joined(tables)) == bytes(converter.convert(page))
    assert sent.unit == converter.unit < whole.page_bytes


def test_layers_keep_their_order_in_pages_of_several_runs() -> None:
    whole = whole_of("float32", 5, 2, block_tokens=48)
    apart, page = TableBridge(whole, divided_of(whole)), page_of(whole)
    first = apart.part(page, 1, 0)
    size = ranges_of(whole, apart.receiver)[0][1]
    assert [bytes(run) for run in runs_of(first, apart.receiver)] == [
        bytes(run[:size]) for run in runs_of(page, whole)
    ]


def test_kinds_of_the_same_layers_can_ship_to_each_other() -> None:
    whole = whole_of("bfloat16", 5, 2)
    divided = divided_of(whole)
    assert can_ship(whole, divided)
    assert can_ship(divided, whole)
    assert can_ship(divided, with_codec(whole, "int8"))
    assert not can_ship(with_codec(whole, "int8"), divided), "what a codec changed isn't exact"


@pytest.mark.parametrize(
    "other",
    [
        whole_of("float32", 7, 2),
        whole_of("float32", 5, 2, block_tokens=48),
        in_pages_of(layout_for("float32", 7, 2, 8), 16),
        msgspec.structs.replace(whole_of("float32", 5, 2), fidelity="float32~int8"),
    ],
    ids=["layers", "page size", "no window", "codec"],
)
def test_other_layers_or_page_sizes_are_refused_by_name(other: KvLayout) -> None:
    divided = divided_of(whole_of("float32", 5, 2))
    assert not can_ship(other, divided)
    with pytest.raises(LayoutMismatch, match=r"windows: |block_tokens: |fidelity: "):
        TableBridge(other, divided)
