"""Tests what settings say, which blocks a prompt keeps, how steps are cut, and peers that say something else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.layout.bridge import bridge, can_ship
from baton.kv.layout.page import in_pages_of, layout_for, sliding_window
from baton.kv.layout.selection import (
    AttentionSelection,
    PromptSelection,
    Selection,
    marked,
    observed_of,
    parsed,
    prompt_selection_of,
)
from baton.kv.pages.pool import PagePool
from baton.protos.errors import ConfigError, LayoutMismatch

ALL = layout_for("float32", 1, 1, 4)
SOME = layout_for("float32", 1, 1, 4, fidelity=marked("float32", parsed("snapkv:128,window:32")))


def test_settings_say_what_they_say():
    assert parsed("all") is None
    assert parsed("sinks:64,window:4096") == Selection(64, 4096)
    assert parsed("snapkv:1024") == AttentionSelection(1024, 64)
    assert str(parsed("snapkv:1024,window:32")) == "snapkv:1024,window:32"


@pytest.mark.parametrize(
    "text", ["sinks:64", "snapkv:", "snapkv:100", "snapkv:64,window:64", "snapkv:8192,window:2048", "h3o:64"]
)
def test_what_can_not_be_is_refused_by_name(text: str):
    with pytest.raises(ConfigError, match=r"worker\.kv_selection"):
        parsed(text)


def test_prompts_within_the_budget_keep_all():
    assert prompt_selection_of(ALL, 10_000) is None
    assert prompt_selection_of(SOME, 128) is None
    assert prompt_selection_of(SOME, 145) == PromptSelection(6, 7, 145, 16)
    assert prompt_selection_of(in_pages_of(SOME, 48), 500) == PromptSelection(2, 9, 500, 48)


@given(st.integers(145, 2000), st.integers(0, 300), st.integers(1, 300))
def test_those_that_choose_are_computed_in_one_step_and_nothing_behind_them_with_them(prompt, emitted, most):
    kept, end, at = prompt_selection_of(SOME, prompt), prompt + emitted, 0
    watched = list[int | None]()
    while at < end:
        stop = kept.cut(at, min(at + most, end))
        assert stop > at
        assert stop - at <= max(most, 32 + 15)
        watched.append(kept.watched_in(at, stop))
        at = stop
    assert [place for place in watched if place is not None] == [kept.first * 16]


def test_ties_go_to_earlier_blocks_and_names_are_those_of_the_prompt():
    kept = PromptSelection(2, 5, 100, 16)
    assert kept.chosen([1.0, 3.0, 2.0, 3.0, 2.0]) == [1, 3]
    assert kept.chosen([0.0] * 5) == [0, 1]
    one, other = ([bytes([salt]) * 32 for salt in range(first, first + 7)] for first in (0, 9))
    assert kept.named(one)[2:] == one[2:]
    assert not {*kept.named(one)[:2]} & {*one, *kept.named(other)}


def test_a_lease_that_selects_gives_the_others_back_and_its_table_names_no_page_of_theirs():
    pool = PagePool(12)
    lease = pool.open([], 8)
    pages = list(lease.pages)
    lease.select([1, 3], 6)
    assert lease.pages == [pages[1], pages[3], *[pages[6]] * 4, pages[6], pages[7]]
    assert (lease.gap, lease.own) == ((2, 6), [pages[1], pages[3], pages[6], pages[7]])
    assert pool.snapshot_counts().leased == 4
    lease.extend(1)
    pool.check()
    lease.close()
    assert pool.snapshot_counts().leased == 0


def test_peers_that_keep_otherwise_are_refused_by_name_before_a_byte_moves():
    newer = msgspec.structs.replace(SOME, fidelity="float32@thinking:64")
    for theirs in (ALL, newer, msgspec.structs.replace(SOME, fidelity="float32@snapkv:256,window:32")):
        assert not can_ship(SOME, theirs)
        with pytest.raises(LayoutMismatch, match="fidelity"):
            bridge(SOME, theirs)
    with pytest.raises(LayoutMismatch, match="pages chosen by 16 tokens"):
        bridge(SOME, in_pages_of(SOME, 32))
    assert (observed_of(newer), sliding_window(newer)) == (None, 0)
