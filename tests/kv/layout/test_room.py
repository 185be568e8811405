"""Tests how long a prompt and its answer may be for a pool of so many pages."""

from __future__ import annotations

import msgspec
import pytest

from baton.kv.layout.page import layout_for
from baton.kv.layout.room import LEAST_SLIDE, context_room, prompt_pages, prompt_room
from baton.kv.layout.state import state_pages
from baton.kv.pages import lease
from baton.protos.nouns import KvLayout, LayerGroup, StatePlane


def layout(*windows: int, **fields: object) -> KvLayout:
    groups = tuple(LayerGroup("full", ("k", "v"), 1, 1, 16, window) for window in windows)
    return msgspec.structs.replace(layout_for("float32", groups), **fields)


@pytest.mark.parametrize(("block_tokens", "room"), [(16, 160), (64, 640)])
def test_pages_of_more_tokens_hold_more(block_tokens: int, room: int) -> None:
    assert prompt_room(layout(0, block_tokens=block_tokens), 10) == room


def test_recurrent_states_take_pages_too() -> None:
    found = layout(0, states=(StatePlane("s", 1, (1000,)),))
    assert state_pages(found) == 2
    assert prompt_room(found, 10) == 6 * 16
    assert prompt_room(found, 3) == 0


@pytest.mark.parametrize("windows", [(), (0, 64), (0, 64, 64, 64), (0, 64, 4096)])
@pytest.mark.parametrize("pages", [1, 10, 100, 150, 400, 5000])
def test_a_prompt_has_room_where_its_pages_at_once_fit(windows: tuple[int, ...], pages: int) -> None:
    found = layout(0, windows=windows)
    blocks = prompt_room(found, pages) // 16
    assert prompt_pages(found, blocks) <= pages < prompt_pages(found, blocks + 1)


def test_pages_behind_a_window_are_given_back_by_as_many_as_is_counted_with() -> None:
    assert LEAST_SLIDE == lease.LEAST_SLIDE


@pytest.mark.parametrize(("windows", "room"), [((0,), 160), ((64, 0), 160), ((64, 64), 4096)])
def test_only_where_every_layer_has_a_window_may_an_answer_outgrow_the_pool(
    windows: tuple[int, ...], room: int
) -> None:
    assert context_room(layout(*windows), 10, 4096) == room
    assert context_room(layout(*windows), 10, 100) == 100
