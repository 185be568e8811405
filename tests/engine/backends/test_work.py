"""Tests what a step costs and what the machine can do: plausible, and of the model that was loaded."""

import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from tests.conformance.checkpoints import make


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make(tmp_path_factory.mktemp("work"), "llama3", hidden_size=192)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_costs_are_the_models_and_the_ceilings_the_machines(directory, quantization, tmp_path):
    runner = load_runner(EngineConfig(str(directory), quantization=quantization, cache_dir=str(tmp_path)))
    work = runner.work
    assert work is not None
    assert work.step_bytes < runner.spec.weight_bytes < 2 * work.step_bytes + 4 * 192 * runner.spec.vocab_size
    assert work.token_flops > 0
    assert work.sample_flops > 0
    assert work.pair_flops > 0
    assert work.context_bytes == runner.spec.layout.page_bytes / 16
    assert 1e8 < work.peak_bytes < 1e13
    assert 1e8 < work.peak_flops < 1e16


def test_a_rounded_model_reads_less_for_the_same_operations(directory, tmp_path):
    plain, rounded = (
        load_runner(EngineConfig(str(directory), quantization=q, cache_dir=str(tmp_path))).work
        for q in ("none", "int8")
    )
    assert rounded.step_bytes < plain.step_bytes
    assert rounded.token_flops == pytest.approx(plain.token_flops)
