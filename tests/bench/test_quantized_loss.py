"""Tests what quantization costs, on the demo model's first document: every row, and its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.kernels.abi import native
from baton.quantize.schemes import Recipe
from bench import quantized_loss
from bench.quantized_loss import DEMO, LossText, measure

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


def test_a_fold_is_judged_by_a_checkpoint_that_has_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read, judged = list[str](), list[str]()

    def nothing_more(source: object, recipe: Recipe, samples: object, folder: Path) -> None:
        folder.mkdir()

    def bits_of(folds: quantized_loss.Folds, model: Path, texts: list[str]) -> float:
        judged.append(" ".join(texts))
        return 1.0 if model == DEMO else 1.5

    monkeypatch.setattr(quantized_loss, "quantize", nothing_more)
    monkeypatch.setattr(quantized_loss, "read_samples", lambda _, path, *__: read.append(Path(path).read_text()))
    monkeypatch.setattr(quantized_loss.Folds, "_bits", bits_of)
    folds = quantized_loss.Folds(DEMO, LossText(DEMO / "heldout.txt", 3), 3, None)
    assert folds.added(Recipe("awq", symmetric=False)) == pytest.approx(0.5)
    for one, others in zip(judged[3:], read, strict=True):
        assert one not in others
        assert len(others.split("\f")) == 2
