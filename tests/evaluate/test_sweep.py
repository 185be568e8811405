"""A sweep over weights and KV: every pair has a row, and what it costs is measured on the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import baton
from baton.evaluate.sweep import schemes, sweep
from baton.evaluate.text import read_documents

DEMO = Path(baton.__file__).resolve().parents[1] / "models" / "demo"


def test_every_form_of_weights_comes_with_every_kv() -> None:
    found = schemes("m", ("packed",), ("auto", "fp8"))
    forms = [(each.weights or each.config.quantization, each.config.kv_cache_dtype) for each in found]
    kinds = ("none", "int8", "int4", "checkpoint")
    assert forms == [(weights, kv) for kv in ("auto", "fp8") for weights in kinds]
    assert [each.name for each in found[:5]] == [
        "bfloat16", "int8, on load", "int4, on load", "packed", "bfloat16, fp8 KV"
    ]  # fmt: skip


@pytest.mark.thorough
def test_a_form_has_its_size_its_speed_and_its_loss_over_the_first(tmp_path: Path) -> None:
    asked = schemes(str(DEMO), (), ("bf16", "int8"), str(tmp_path))
    texts = read_documents(DEMO / "heldout.txt", 2)
    plain, narrow = sweep([asked[0], asked[-1]], texts, lambda text: None)
    assert (plain.added, plain.quantization, plain.kv_cache_dtype) == (0.0, "none", "bf16")
    assert (narrow.quantization, narrow.kv_cache_dtype) == ("int4", "int8")
    assert narrow.gigabytes < 0.6 * plain.gigabytes
    assert -0.01 < narrow.added < 0.03
    assert min(narrow.decode_one, narrow.decode_many, narrow.prompt) > 0
