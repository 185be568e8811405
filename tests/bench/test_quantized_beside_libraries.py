"""Tests the bench of checkpoints beside the original libraries' with a library that only copies the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.quantize.schemes import Recipe
from bench import quantized_beside_libraries as bench
from bench.peers import quantizers_side
from bench.peers.environments import REQUIREMENTS
from tests.conformance.checkpoints import make
from tests.quantize.conftest import HEADS, SIZES

LIBRARY = """#!/bin/sh
cp -r "$3" "$5" && echo "progress" && echo "copier 1.2"
"""


def test_every_pair_names_a_maker_and_an_environment() -> None:
    for pair in bench.PAIRS:
        assert pair.maker in quantizers_side.MAKERS
        assert pair.environment in REQUIREMENTS
        pair.recipe.checked()


def test_rows_say_what_each_side_adds_and_ours_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "model", "qwen2", tokenizer=True, **SIZES | HEADS)
    shutil.copy(bench.DEMO / "heldout.txt", model)
    python = tmp_path / "python"
    python.write_text(LIBRARY)
    python.chmod(0o755)
    bits = {"model": [100.0, 200.0], "own_fp8": [101.0, 202.0], "copied": [102.0, 203.0]}
    monkeypatch.setattr(bench.Work, "_bits", lambda self, path: bits[path.name])
    work = bench.Work(tmp_path / "work", model, {"copying": python})
    theirs, ours, share = work.rows(bench.Pair(Recipe("fp8"), "copying", "copied"))
    assert (theirs.name, ours.name) == ("fp8: by copier 1.2", "fp8: by baton quantize")
    assert (theirs.value, ours.value) == (pytest.approx(5 / 3), pytest.approx(1.0))
    assert share.value == pytest.approx(3 / 5)
    assert share.reached
    assert (tmp_path / "work" / "own_fp8" / "config.json").exists()


def test_where_a_library_loses_nothing_the_difference_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = {"model": [1e5], "own": [1e5 + 6], "library": [1e5 - 1]}
    monkeypatch.setattr(bench.Work, "__init__", lambda self: setattr(self, "_model", tmp_path / "model"))
    monkeypatch.setattr(bench.Work, "_bits", lambda self, path: bits[path.name])
    monkeypatch.setattr(bench.Work, "_own", lambda self, recipe: tmp_path / "own")
    monkeypatch.setattr(bench.Work, "_library", lambda self, pair: tmp_path / "library")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "made_by.json").write_text('"smoother 1"')
    *_, judged = bench.Work().rows(bench.PAIRS[4])  # type: ignore[call-arg]
    assert judged.name == "smoothquant: ours less theirs"
    assert judged.value == pytest.approx(0.007)
    assert judged.reached
