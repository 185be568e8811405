"""Workers of several cards on paper: what fits, what each way to share brings, and by hand the step of one card."""

from __future__ import annotations

import pytest

from baton.planner.costs.data_sheets import accelerators
from baton.planner.costs.model_shape import model_shape
from baton.planner.costs.worker import roofline
from bench.wide_workers import CONTEXT, MIXTURES, Layout, Wide, requests, rows_of

DENSE, MIXED = "llama-3-70b", "qwen3-235b-a22b"
H200 = accelerators()["h200"]


def alone(name: str, layout: Layout) -> float:
    shape, experts = MIXTURES.get(name) or (model_shape(name), None)
    return Wide(shape, experts, H200, layout).costs(1).step_seconds(0, 0.0, 1, float(CONTEXT))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_by_columns_a_worker_costs_what_the_planner_says(tp: int) -> None:
    ours, theirs = (
        Wide(model_shape(DENSE), None, H200, Layout(tp, 1, 1)),
        roofline(model_shape(DENSE), "h200", H200, tp),
    )
    assert ours.kv_tokens == theirs.kv_tokens
    for work in ((0, 0.0, 64, 64.0 * CONTEXT), (2048, 2048 * 1024.0, 0, 0.0)):
        assert ours.costs(64).step_seconds(*work) == pytest.approx(theirs.step_seconds(*work), rel=1e-3)


def test_stages_hold_more_and_answer_one_sequence_no_faster() -> None:
    assert alone(DENSE, Layout(2, 2, 1)) == pytest.approx(alone(DENSE, Layout(2, 1, 1)), rel=1e-3)
    assert alone(DENSE, Layout(4, 1, 1)) < alone(DENSE, Layout(2, 1, 1))


def test_only_what_fits_a_card_and_the_number_of_cards_is_listed() -> None:
    dense = {row["worker"] for row in rows_of(DENSE, "h200", 8, seconds=0)}
    assert dense == {"tp2", "tp4", "tp8", "pp2", "tp2 pp2", "tp4 pp2", "pp8"}
    mixed = {row["worker"]: row for row in rows_of(MIXED, "h200", 64, seconds=0)}
    assert {"tp8", "ep8", "ep64"} <= mixed.keys()
    assert mixed["ep64"]["kv_tokens_per_card"] > mixed["ep8"]["kv_tokens_per_card"]
    assert not {"tp1", "tp2", "one card"} & mixed.keys()


def test_a_trace_is_the_same_each_time() -> None:
    assert requests(2.0, 30.0) == requests(2.0, 30.0)
