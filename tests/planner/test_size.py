"""Tests how many of which accelerator, of one rank each, and in which precision."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cluster.config import WorkerConfig
from baton.console.main import app
from baton.planner.costs.model_shape import model_shape
from baton.planner.costs.worker import accelerators, at_precision
from baton.planner.score import Slo
from baton.planner.size import FORMS, SizingQuestion, memory, size
from baton.planner.traces.trace import Trace, read_trace
from baton.protos.errors import ConfigError

AZURE = Path(__file__).parents[1] / "data" / "azure_2023_conversation_300.csv"
SHEETS = accelerators()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(str(AZURE)).between(0, 20)


def test_memory_is_weights_activations_and_kv() -> None:
    found = memory(at_precision(model_shape("llama-3-70b"), "int4", "int8"), SHEETS["h100"])
    assert found.usable == pytest.approx(found.weights + found.activations + found.kv)
    assert found.weights == pytest.approx(42e9, rel=0.01)
    assert found.kv_bytes_per_token == 80 * 8 * 2 * (128 + 4)
    assert found.kv_tokens == pytest.approx(found.kv / found.kv_bytes_per_token, rel=1e-4)


def test_a_model_that_fits_no_card_plain_is_rounded_as_little_as_it_takes(trace: Trace) -> None:
    """70 billion weights on one card: int8 in 141 GB, int4 in 80 GB, where the engine's own kernels run."""
    asked = SizingQuestion(trace, Slo(10.0, 0.2), 0.9, 16)
    found = {s.accelerator: s for s in size(model_shape("llama-3-70b"), asked, ["h100", "h200", "a100"])}
    assert found["h200"].settings == {"quantization": "int8", "kv_cache_dtype": "int8"}
    assert found["h100"].settings == {"quantization": "int4", "kv_cache_dtype": "int8"}
    for name in ("h100", "h200"):
        assert found[name].found is not None, found[name].why
        assert found[name].accelerators == found[name].found.prefill + found[name].found.decode
    assert found["a100"].found is None
    assert "141 GB of weights in 72 GB leave no room" in found["a100"].why
    assert "those are not for a100" in found["a100"].why


def test_the_forms_are_settings_that_a_worker_takes() -> None:
    for quantization, kv_cache_dtype in FORMS:
        WorkerConfig(quantization=quantization, kv_cache_dtype=kv_cache_dtype)


def test_nothing_is_rounded_where_it_must_be_exact_or_is_rounded_already(trace: Trace) -> None:
    shape = model_shape("llama-3-70b")
    with pytest.raises(ConfigError, match="141 GB of weights in 72 GB"):
        size(shape, SizingQuestion(trace, Slo(10.0, 0.2), 0.9, 4, exact=True), ["h100"])
    packed = msgspec.structs.replace(
        shape, precision=msgspec.structs.replace(shape.precision, linear=4.25, packed=True)
    )
    found = size(packed, SizingQuestion(trace, Slo(10.0, 0.2), 0.9, 16), ["h100"])[0]
    assert found.found is not None
    assert "quantization" not in found.settings


def test_a_tighter_slo_never_needs_fewer(trace: Trace) -> None:
    shape, fast = model_shape("llama-3-8b"), trace.faster(4.0)
    easy = size(shape, SizingQuestion(fast, Slo(2.0, 0.1), 0.95, 8), ["a100"], {"a100": 2.0})[0]
    hard = size(shape, SizingQuestion(fast, Slo(0.2, 0.02), 0.95, 8), ["a100"], {"a100": 2.0})[0]
    assert easy.found is not None
    assert easy.found.score.attainment >= 0.95
    assert easy.per_hour == 2.0 * easy.accelerators
    assert hard.found is None or hard.accelerators >= easy.accelerators


def test_what_cannot_be_met_says_how_near_it_came_and_the_least_that_can(trace: Trace) -> None:
    shape = model_shape("llama-3-8b")
    never = size(shape, SizingQuestion(trace, Slo(1e-3, 1e-4), 0.9, 2, exact=True), ["h100"])[0]
    assert never.found is None
    assert "2 workers reach 0.0%" in never.why
    assert "more workers don't help: one by one on an idle worker 0.0%" in never.why
    assert "the least that 90% keep there is TTFT" in never.why
    few = size(shape, SizingQuestion(trace.faster(60.0), Slo(0.3, 0.1), 0.9, 1, exact=True), ["h100"])[0]
    assert few.found is None
    assert "the fewest workers that do are" in few.why


def test_what_the_engine_does_not_run_on_is_said(trace: Trace) -> None:
    found = size(model_shape("llama-3-8b"), SizingQuestion(trace, Slo(2.0, 0.1), 0.9, 2), ["mi300x", "h100"])
    assert [s.accelerator for s in found] == ["h100", "mi300x"]
    assert found[1].found is None
    assert "runs on CUDA" in found[1].why


def test_unknown_or_too_small_accelerators_are_named(trace: Trace) -> None:
    asked = SizingQuestion(trace, Slo(1, 1), 0.9, 2)
    with pytest.raises(ConfigError, match="mi300x"):
        size(model_shape("llama-3-8b"), asked, ["abacus"])
    with pytest.raises(ConfigError, match="no accelerator"):
        size(model_shape("bloom-176b"), asked, ["l40s"])


def test_the_command_prints_a_row_per_accelerator() -> None:
    flags = ["size", "--model", "llama-3-8b", "--trace", str(AZURE), "--gpus", "h100=2.5,l40s=1", "--seconds", "30"]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    assert "h100" in done.output
    assert "l40s" in done.output


def test_an_accelerator_without_a_price_is_not_called_the_cheapest(trace: Trace) -> None:
    asked = SizingQuestion(trace, Slo(2.0, 0.1), 0.9, 2)
    found = size(model_shape("llama-3-8b"), asked, ["h100", "h200"], {"h200": 3.5})
    assert [(s.accelerator, s.per_hour is None) for s in found] == [("h200", False), ("h100", True)]
