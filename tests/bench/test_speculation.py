"""The benchmark of speculation gives all its rows on a tiny model, judges them by its rule and needs no peer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.bench.engine import models
from baton.bench.rows import Row
from baton.kernels.abi import native
from bench import speculation
from bench.peers import lookup
from bench.speculation import rule
from bench.speculation_loop import Bench, Extent
from bench.speculation_tail import LOOPS, p99, pooled, rows, tail

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32000,
}


@pytest.mark.thorough
@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_each_part_gives_its_rows_and_never_worse_is_judged_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SIZES, "tiny", TINY)
    extent = Extent(1, 6, (1, 2), (0.0, 0.9), fixed_steps=2, warm_steps=6, steps=6, tail_steps=12)
    bench = Bench(models.random_runner("tiny", "bf16", "bf16")[0], 2, extent, loops=LOOPS)
    rows = [row for part in (speculation.oracle, speculation.real, tail) for row in part(bench, 2)]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert {"batch 2, acceptance 0.0", "batch 2, copied text", "batch 2, misleading text"} <= set(names)
    assert sum(row.ceiling for row in rows) == 5
    assert sum("steps with drafts" in name for name in names) == 2
    assert sum(row.target == speculation.NEVER_WORSE for row in rows) == 3
    assert rule(rows).value in (0.0, 1.0)


def test_the_rule_names_what_can_be_felt() -> None:
    fine = [Row("slow", 0.98, "", target=speculation.NEVER_WORSE), Row("late", 1.01, "", target=1.02, ceiling=True)]
    assert rule([*fine, Row("copied", 1.1, "", target=2.0)]).reached
    for bad in (
        Row("slow", 0.97, "", target=speculation.NEVER_WORSE),
        Row("late", 1.03, "", target=1.02, ceiling=True),
    ):
        found = rule([*fine, bad])
        assert not found.reached
        assert found.name.endswith(f"not by: {bad.name}")


def steps(draws: int, longer: float = 0.0) -> NDArray[np.float64]:
    """Returns 30 rounds of 100 steps of 3 ms and some noise, of which each is ``longer``."""
    rng = np.random.default_rng(draws)
    return 0.003 + rng.exponential(0.0001, (30, 100)) + longer


def test_a_percentile_is_judged_by_what_two_loops_without_drafts_differ() -> None:
    same, beyond = rows("x", steps(1), steps(2), steps(3))
    assert same.reached
    assert same.low < 1.0 < same.high
    assert 1.0 < same.target < 1.1
    assert beyond.low < 0.01 < beyond.high
    assert "of 3000 steps" in same.name
    [all_texts] = pooled([same, beyond] * 4)
    assert all_texts.reached
    assert all_texts.high - all_texts.low == pytest.approx((beyond.high - beyond.low) / 2)
    later, beyond = rows("x", steps(1, longer=0.0003), steps(2), steps(3))
    assert not later.reached
    assert later.low > 1.0
    assert beyond.low > 0.01
    assert not any(row.reached for row in pooled([later, beyond]))
    assert not [*pooled([later])]


def test_noise_that_meets_a_round_of_all_loops_is_no_difference() -> None:
    slow = np.where(np.arange(30) % 7, 1.0, 1.5)[:, None]
    row, _ = rows("x", steps(1) * slow, steps(2) * slow, steps(3) * slow)
    assert row.reached
    assert row.high - row.low < 0.1
    assert p99(steps(1)) < 0.004


def test_small_batches_take_more_rounds_so_that_a_percentile_has_steps_to_be_of() -> None:
    assert [speculation.QUICK.rounds_at(batch) for batch in (1, 8, 32)] == [5, 5, 3]
    assert [Extent(5).rounds_at(batch) for batch in (1, 8, 32)] == [15, 10, 5]
    assert [Extent(5).tail_rounds_at(batch) for batch in (1, 8, 32, 64)] == [20, 20, 10, 7]


def test_a_peer_that_is_not_set_up_is_left_out_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lookup, "HOME", tmp_path)
    assert lookup.looked_up("150M", [([1, 2], [3, 4])], 2) is None
    assert lookup.looked_up_by_vllm("150M", [([1, 2], [3, 4])], 2) is None
    told = capsys.readouterr().err
    assert "no llama.cpp here" in told
    assert "no vLLM here" in told
