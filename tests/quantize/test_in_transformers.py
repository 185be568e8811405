"""Tests what ``baton quantize`` writes, beside what transformers makes of it (tests/data/quantized/make_own.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe
from baton.quantize.source import Source
from tests.data.quantized.make_own import EXPERTS, EXPERTS_PLAIN, PLAIN, READ_TEXT, RECIPES
from tests.engine.quant.test_original_libraries import MADE, PLACES, answers, loaded

OWN = MADE / "own"
TABLE = 6e-3  # of NF4's table, which becomes int8 here
VALUES = {"nf4": TABLE, "mxfp4": 1e-6}
HALF = 6e-4
ACTIVATIONS = {"fp8": 0.2, "experts_fp8": 0.2, "smoothquant": 0.2}  # rounded there as well, to other steps


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's files."""
    return {name: tensor for path in sorted(folder.glob("model-*")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", [name for name in (*RECIPES, *EXPERTS) if name not in READ_TEXT])
def test_the_checkpoint_that_transformers_loaded_is_what_is_written_today(name: str, tmp_path: Path) -> None:
    plain = EXPERTS_PLAIN if name in EXPERTS else PLAIN
    quantize(Source(str(plain)), Recipe(**(RECIPES | EXPERTS)[name]).checked(name in EXPERTS), (), tmp_path)  # type: ignore[arg-type]
    ours, known = stored(tmp_path), stored(OWN / name)
    assert ours.keys() == known.keys()
    for key, tensor in known.items():
        assert torch.equal(ours[key].view(torch.uint8), tensor.view(torch.uint8)), key
    written, kept = (json.loads((at / "config.json").read_text()) for at in (tmp_path, OWN / name))
    assert written["quantization_config"] == kept["quantization_config"]


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_has_the_values_that_this_engine_has(name: str, tmp_path: Path) -> None:
    expected, found = load_file(OWN / name / "expected.safetensors"), loaded(OWN / name, tmp_path).weights
    for place, weight in PLACES.items():
        wanted, packed = expected[f"model.layers.0.{place}.weight"], found[weight]
        off = (packed.dequantized()[: len(wanted)] - wanted).norm() / wanted.norm()  # type: ignore[union-attr]
        assert float(off) <= VALUES.get(name, HALF), place


@pytest.mark.parametrize("name", [*RECIPES, *EXPERTS])
def test_transformers_answers_from_it_as_this_engine_does(name: str, tmp_path: Path) -> None:
    logits = load_file(OWN / name / "expected.safetensors")["logits"].log_softmax(-1)
    near = ACTIVATIONS.get(name, 0.1)
    for row, (token, logprob) in zip(logits, answers(OWN / name, tmp_path), strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=near)
        assert float(row.max() - row[token]) < near
