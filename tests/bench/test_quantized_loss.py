"""Tests what quantization costs, on the demo model's first document: every row, and its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.kernels.abi import native
from bench.quantized_loss import DEMO, measure

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "quantized_loss.json"
TARGETS = {"int8 weights": 0.2, "int4 weights": 3.0, "int8 KV": 0.2, "fp8 KV": 1.0}


@pytest.mark.soak
@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_each_scheme_has_its_loss_and_its_target() -> None:
    rows = {row.name: row for row in measure(DEMO, DEMO / "heldout.txt", 1)}
    for what, most in TARGETS.items():
        row = rows[f"added by {what}"]
        assert row.target == most
        assert row.reached
        assert 0.5 < rows[f"loss, {what}"].value < 3


def test_the_committed_figures_are_of_the_whole_text_and_within_their_targets() -> None:
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text())}
    assert "110 documents" in rows
    assert all(rows[f"added by {what}"]["value"] <= most for what, most in TARGETS.items())
