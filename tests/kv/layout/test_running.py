"""Tests which pages an answer gives up: by hand for a few, and against a plain account of every page for many."""

from __future__ import annotations

import numpy as np
import pytest

from baton.kv.layout.running import RunningScores
from baton.kv.layout.selection import AttentionSelection, parsed

H2O = AttentionSelection(64, 32, running=True)  # two pages and a window of two


def test_the_text_of_the_setting_is_the_fidelitys() -> None:
    assert parsed("h2o:64,window:32") == H2O
    assert str(H2O) == "h2o:64,window:32"
    assert parsed("snapkv:64,window:32") != H2O


def test_the_page_that_was_paid_least_goes_when_one_leaves_the_window() -> None:
    scores = RunningScores(H2O, 16, prompt=70, kept=None)
    assert scores.first == 2
    assert scores.cut(0, 100) == 70
    assert scores.cut(70, 100) == 80
    scores.add(np.array([[5.0, 1.0, 2.0, 0.0, 9.0]], np.float32))
    assert scores.kept_at(79) is None
    assert scores.kept_at(80) == [0, 2], "of blocks 0, 1 and 2"
    assert scores.first == 3
    scores.add(np.array([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]], np.float32))
    assert scores.kept_at(96) == [0, 1], "of equal ones the older stay: 5, 2 and 1"
    fresh = scores.fresh()
    assert (fresh.first, fresh.kept_at(80)) == (2, [0, 1])


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("prompt", [20, 150, 700])
def test_the_kept_pages_are_those_of_a_plain_account(size: int, prompt: int) -> None:
    rng, observed = np.random.default_rng(prompt), AttentionSelection(288, 96, running=True)
    kept = observed.prompt_selection_of(prompt, size)
    scores, slots = RunningScores(observed, size, prompt, kept), 192 // size
    first = max(0, prompt - 96) // size
    seen = list(range(first if kept is None else slots))  # stand-ins for what was chosen
    blocks, sums, step = [*seen, *range(first, -(-prompt // size))], dict[int, float](), prompt
    if kept is not None:
        blocks = [-1 - block for block in seen] + blocks[slots:]
    while step < prompt + 400:
        step += 1
        if blocks[-1] < (step - 1) // size:
            blocks.append((step - 1) // size)
        row = rng.random(-(-((len(blocks) - 1) * size + (step - 1) % size + 1) // 16)).astype(np.float32)
        for at, value in enumerate(row):
            block = blocks[at * 16 // size]
            sums[block] = sums.get(block, 0.0) + float(value)
        scores.add(row[None])
        due, found = max(0, step - 96) // size, scores.kept_at(step)
        before = [block for block in blocks if block < due]
        if found is None:
            assert len(before) <= slots
            continue
        best = sorted(before, key=lambda block: (-sums.get(block, 0.0), before.index(block)))[:slots]
        assert [before[at] for at in found] == [block for block in before if block in best]
        blocks = [block for block in blocks if block in best or block >= due]
        assert len(blocks) <= slots + 96 // size + 2
