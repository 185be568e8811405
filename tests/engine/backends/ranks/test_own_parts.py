"""A rank's part of adapters is what cutting plain matrices by its rows gives, wherever its rows begin."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.adapters.packed import PackedAdapter, PackedPart, pack
from baton.engine.adapters.part_table import PartTable
from baton.engine.adapters.reading import room
from baton.engine.backends.native.adapter_structs import address_of
from baton.engine.backends.ranks.own_parts import OwnParts, any_copies
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.shares import Widths
from baton.engine.program.sites import Site, adaptable, sites_of
from baton.kernels.lora.structs import PANEL, panelled, unpack_b
from tests.conformance.checkpoints import make

Ranges = tuple[tuple[int, int], ...]


def share(rows: dict[str, Ranges], sites: dict[int, str], head_site: int = 99, spare: int = 0) -> Any:
    """Returns what ``OwnParts`` reads of a rank's program, without the program."""
    return SimpleNamespace(rows=rows, sites=sites, head_site=head_site, rank=SimpleNamespace(spare=spare))


def adapter(sites: list[tuple[Site, int, bool]]) -> PackedAdapter:
    """An adapter of random matrices beside ``sites``, each with its rank and whether it is narrow."""
    parts, at = list[PackedPart](), 0
    for site, rank, narrow in sites:
        size = 2 if narrow else 4
        b = at + -(-size * rank * site.inputs // 64) * 64
        parts.append(PackedPart(site, rank, 1.0, narrow, at, b))
        at = b + size * rank * panelled(site.outputs)
    found = PackedAdapter(tuple(parts), room(at))
    for part in parts:
        shape = (part.rank, part.site.inputs), (part.site.outputs, part.rank)
        pack(found, part, *(np.random.rand(*each).astype(np.float32) for each in shape))
    return found


def own(program: Any, packed: PackedAdapter) -> list[tuple[PackedPart, Any, Any]]:
    """The rank's parts with their plain matrices, read at the addresses that the native step gets."""
    rows, _ = kept = OwnParts(program).of(PartTable.of(packed.parts).rows, packed.memory)
    base, found = address_of(packed.memory), []
    for part in PartTable(rows):
        count = panelled(part.site.outputs) // PANEL * PANEL
        a = at(base + part.a, part, part.rank * part.site.inputs).reshape(part.rank, part.site.inputs)
        b = at(base + part.b, part, count * part.rank).reshape(-1, part.rank, PANEL)
        found.append((part, a.copy(), unpack_b(b, part.site.outputs).copy()))
    del kept
    return found


def at(address: int, part: PackedPart, count: int) -> Any:
    held = (ctypes.c_char * (count * part.dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(held).cast("B"), part.dtype)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[tuple[Site, int, bool]], Ranges]:
    """Modules that stand side by side beside one site, and the ranges of its outputs that a rank has."""
    sites, first = [], 0
    for _ in range(draw(st.integers(1, 3))):
        outputs = draw(st.integers(1, 300))
        sites.append(
            (Site(2, first, outputs, draw(st.integers(1, 40))), draw(st.integers(1, 9)), draw(st.booleans()))
        )
        first += outputs
    edges = sorted(draw(st.sets(st.integers(0, first), min_size=2, max_size=6)))
    return sites, tuple(zip(edges[::2], edges[1::2], strict=False))


@given(cuts())
def test_every_cut_has_the_rows_of_the_plain_matrices(drawn: tuple[list[tuple[Site, int, bool]], Ranges]) -> None:
    sites, ranges = drawn
    packed = adapter(sites)
    wanted, local = [], 0
    for begin, end in ranges:
        for part in packed.parts:
            site = part.site
            low, high = max(begin, site.first), min(end, site.first + site.outputs)
            if low < high:
                plain = packed.plain_second(part)[low - site.first : high - site.first]
                wanted.append((local + low - begin, plain, packed.first(part)))
        local += end - begin
    found = own(share({"w": ranges}, {2: "w"}), packed)
    assert len(found) == len(wanted)
    for (part, a, b), (first, second, other) in zip(found, sorted(wanted, key=lambda one: one[0]), strict=True):
        assert (part.site.first, part.site.outputs) == (first, len(second))
        assert np.array_equal(b, second)
        assert np.array_equal(a, other)


def test_parts_of_other_ranks_are_left_out_and_whole_ones_and_lookups_stay() -> None:
    sites = [Site(0, 0, 64, 8), Site(1, 0, 128, 8), Site(3, 0, 64, 8, looked_up=True), Site(9, 0, 64, 8)]
    packed = adapter([(site, 4, True) for site in sites])
    program = share({"cut": ((64, 128),), "table": ((0, 4),)}, {0: "whole", 1: "cut", 3: "table"})
    found = [(part.site.number, part.site.first, part.site.outputs) for part, _, _ in own(program, packed)]
    assert found == [(0, 0, 64), (1, 0, 64), (3, 0, 64)]


def test_beside_experts_a_rank_has_its_own_and_with_spare_places_all() -> None:
    sites = [(Site(5, 16 * expert, 16, 8), 4, True) for expert in range(8)]
    few, every = (share({"e": ((32, 96),)}, {5: "e"}, 4, spare) for spare in (0, 1))
    assert [part.site.first for part, _, _ in own(few, adapter(sites))] == [32, 48, 64, 80]
    assert len(own(every, adapter(sites))) == 8


def test_only_what_begins_inside_a_panel_is_copied() -> None:
    packed = adapter([(Site(0, 0, 256, 8), 4, True)])
    rows = PartTable.of(packed.parts).rows
    parts = [OwnParts(share({"w": ((low, 256),)}, {0: "w"})) for low in (0, 128, 130)]
    assert [of.of(rows, packed.memory).made is None for of in parts] == [True, True, False]
    assert [of.copies([Site(0, 0, 256, 8)]) for of in parts] == [False, False, True]
    within = OwnParts(share({"w": ((1, 300),)}, {0: "w"}))  # a part's panels are counted from its own first output
    assert [within.copies([Site(0, first, 100, 8)]) for first in (0, 1, 2)] == [True, False, False]


def test_what_any_rank_copies_counts_though_the_lead_copies_nothing(tmp_path: Path) -> None:
    """Five ranks have 38 or 39 of 192 rows each, which begin inside panels; the first one's begin at 0."""
    model = ModelConfig.read(
        make(tmp_path, "llama2", num_attention_heads=8, num_key_value_heads=8, hidden_size=192)
    )
    program, ranks = adaptable(program_for(model)), Widths(5)
    sites = tuple(sites_of(program).values())
    assert [OwnParts(ranks.share(program, index)).copies(sites) for index in (0, 1)] == [False, True]
    assert any_copies(program, ranks)
    assert not any_copies(program, Widths(1, 1, 2))  # whole layers
