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


@pytest.mark.parametrize("pages", ["shared", "own"])
def test_layers_that_read_the_k_and_v_of_others_read_and_compute_as_if_these_were_their_own(tmp_path, pages):
    """Checks a model of 6 layers, 4 with a window, of which the last 3 read K and V of others: 2 of them those of a
    layer with a window.
    """
    sharing, apart = (
        load_runner(
            EngineConfig(
                str(make(tmp_path / str(count), "gemma3n", num_kv_shared_layers=count)), window_pages=pages
            )
        ).work
        for count in (3, 0)
    )
    assert sharing.pair_flops == apart.pair_flops
    assert sharing.context_bytes == apart.context_bytes
    assert sum(size for _, size in sharing.windows) == sum(size for _, size in apart.windows)


def test_a_rounded_model_reads_less_for_the_same_operations(directory, tmp_path):
    plain, rounded = (
        load_runner(EngineConfig(str(directory), quantization=q, cache_dir=str(tmp_path))).work
        for q in ("none", "int8")
    )
    assert rounded.step_bytes < plain.step_bytes
    assert rounded.token_flops == pytest.approx(plain.token_flops)
