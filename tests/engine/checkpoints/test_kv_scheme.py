"""Tests what a quantized checkpoint says of KV: its dtype is taken unless another is asked for, scales are
checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.kernels.abi import native
from baton.planner.costs.model_shape import from_config
from baton.protos.errors import CheckpointError
from tests.engine.quant.test_bad_checkpoints import with_settings
from tests.engine.quant.test_original_libraries import MADE, answers

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
CALIBRATED = "ct_fp8_kv"  # by llm-compressor, with scales for K and V


def fidelity(directory: Path, cache: Path, **settings: Any) -> str:
    config = EngineConfig(str(directory), threads=1, cache_dir=str(cache), **settings)
    return load_runner(config).spec.layout.fidelity


def test_kv_is_stored_as_the_checkpoint_was_calibrated_for_unless_one_asks_for_another(tmp_path: Path) -> None:
    assert fidelity(MADE / CALIBRATED, tmp_path) == "float32+fp8_e4m3"
    assert fidelity(MADE / CALIBRATED, tmp_path, kv_cache_dtype="int8") == "float32+int8"
    assert fidelity(MADE / "ct_fp8_static", tmp_path) == "float32"
    assert from_config(str(MADE / CALIBRATED)).precision.kv == 8


def test_answers_from_fp8_kv_are_near_those_of_the_library_that_calibrated_it(tmp_path: Path) -> None:
    logits = load_file(MADE / CALIBRATED / "expected.safetensors")["logits"].log_softmax(-1)
    for row, (token, logprob) in zip(logits, answers(MADE / CALIBRATED, tmp_path), strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=0.1)


@pytest.mark.parametrize("scheme", [{"type": "float", "num_bits": 4}, "fp8"], ids=str)
def test_another_scheme_of_kv_is_refused_with_the_setting_that_comes_before_it(tmp_path: Path, scheme: Any) -> None:
    directory = with_settings(tmp_path, CALIBRATED, kv_cache_scheme=scheme)
    with pytest.raises(CheckpointError, match=r"kv_cache_scheme is .* set worker.kv_cache_dtype"):
        fidelity(directory, tmp_path)
    assert fidelity(directory, tmp_path, kv_cache_dtype="float32") == "float32"


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_scale_of_kv_that_is_no_number_above_0_is_refused_by_name(tmp_path: Path, value: float) -> None:
    directory = with_settings(tmp_path, CALIBRATED)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.full((1,), value)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"self_attn.k_scale is .* one number above 0"):
        fidelity(directory, tmp_path)
