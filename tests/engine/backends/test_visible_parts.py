"""Tests what attention sees under a selection: the parts of a step, held against the definition token by token."""

from __future__ import annotations

import random

import pytest

from baton.engine.backends.visible_parts import visible_parts
from baton.engine.plan import SequenceStep
from baton.kv.layout.bridge import bridge
from baton.kv.layout.page import layout_for, require_same, sliding_window, sunk_blocks
from baton.kv.layout.selection import Selection, marked, parsed, selection_of
from baton.protos.errors import ConfigError, LayoutMismatch


def sees(selection: Selection, query: int, key: int) -> bool:
    return key <= query and (key < selection.sinks or key // 16 >= query // 16 - selection.window // 16)


@pytest.mark.parametrize("seed", range(20))
def test_each_token_finds_the_keys_that_it_sees_and_no_others(seed: int) -> None:
    draw = random.Random(seed)
    selection = Selection(16 * draw.randint(0, 3), 16 * draw.randint(1, 4))
    start, count = draw.randint(0, 200), draw.choice([1, 5, 16, 40, 100])
    pages = list(range(-(-(start + count) // 16)))  # page i holds block i
    rows = list[int]()
    for part in visible_parts(SequenceStep(1, [0] * count, start, pages), selection):
        assert part.first == len(rows)
        for row in range(part.queries):
            query, place = start + len(rows), part.start + row
            found = [16 * part.pages[at // 16] + at % 16 for at in range(place + 1)]
            assert found == [key for key in range(query + 1) if sees(selection, query, key)]
            rows.append(query)
    assert len(rows) == count


@pytest.mark.parametrize("seed", range(5))
def test_pages_behind_the_reach_are_never_seen(seed: int) -> None:
    draw = random.Random(seed)
    for size in (16, 48):
        selection, tokens = Selection(16 * draw.randint(0, 3), 16 * draw.randint(1, 9)), draw.randint(1, 900)
        first = max(0, tokens - selection.reach + 1) // size
        for key in range(selection.sunk(size) * size, first * size):
            assert not any(sees(selection, query, key) for query in range(tokens, tokens + 40))


def test_a_selection_is_a_fidelity_that_another_worker_must_have() -> None:
    selection = parsed("sinks:64,window:4096")
    ours = layout_for("float32", 2, 2, 8, fidelity=marked("float32", selection))
    assert selection_of(ours) == Selection(64, 4096)
    assert (sliding_window(ours), sunk_blocks(ours)) == (4112, 4)
    theirs = layout_for("float32", 2, 2, 8)
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        with pytest.raises(LayoutMismatch, match=r"fidelity: sender 'float32.*', receiver 'float32"):
            require_same(sender, receiver)
        with pytest.raises(LayoutMismatch, match=r"fidelity: sender 'float32.*', receiver 'float32"):
            bridge(sender, receiver)


@pytest.mark.parametrize("text", ["sinks:64", "window:64", "sinks:8,window:64", "sinks:16,window:0", "snap", ""])
def test_an_unknown_selection_is_refused_with_what_could_be_said(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sinks|multiples"):
        parsed(text)
