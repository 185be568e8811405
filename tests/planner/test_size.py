"""How many of which accelerator."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.console.main import app
from baton.planner.costs import accelerators
from baton.planner.model_shape import model_shape
from baton.planner.score import Slo
from baton.planner.size import fewest_ranks, memory, size
from baton.planner.traces import read_trace
from baton.protos.errors import ConfigError

AZURE = Path(__file__).parents[1] / "data" / "azure_2023_conversation_300.csv"
SHEETS = accelerators()


def test_memory_is_weights_activations_and_kv() -> None:
    found = memory(model_shape("llama-3-70b"), SHEETS["h100"], 4)
    assert found.usable == pytest.approx(found.weights + found.activations + found.kv)
    assert found.weights == pytest.approx(141e9, rel=0.01)
    assert found.kv_tokens == pytest.approx(found.kv / 327_680, rel=1e-4)


def test_ranks_are_the_fewest_that_hold_model_and_longest_request() -> None:
    big, small = model_shape("llama-3-70b"), model_shape("llama-3-8b")
    assert fewest_ranks(small, SHEETS["h100"], 10_000) == 1
    assert fewest_ranks(big, SHEETS["h200"], 10_000) == 2
    assert fewest_ranks(model_shape("bloom-176b"), SHEETS["l40s"], 10_000) is None


def test_a_tighter_slo_never_needs_fewer() -> None:
    trace = read_trace(str(AZURE)).between(0, 20).faster(4.0)
    shape = model_shape("llama-3-8b")
    easy = size(shape, trace, Slo(2.0, 0.1), 0.95, ["a100"], 8, {"a100": 2.0})[0]
    hard = size(shape, trace, Slo(0.2, 0.02), 0.95, ["a100"], 8, {"a100": 2.0})[0]
    assert easy.found is not None
    assert easy.found.score.attainment >= 0.95
    assert easy.per_hour == 2.0 * easy.accelerators
    assert hard.found is None or hard.accelerators >= easy.accelerators


def test_what_cannot_be_met_says_how_near_it_came() -> None:
    trace = read_trace(str(AZURE)).between(0, 20)
    found = size(model_shape("llama-3-8b"), trace, Slo(1e-3, 1e-4), 0.9, ["h100"], 2)[0]
    assert found.found is None
    assert "2 workers reach" in found.why


def test_unknown_or_too_small_accelerators_are_named() -> None:
    trace = read_trace(str(AZURE)).between(0, 20)
    with pytest.raises(ConfigError, match="mi300x"):
        size(model_shape("llama-3-8b"), trace, Slo(1, 1), 0.9, ["abacus"], 2)
    with pytest.raises(ConfigError, match="no accelerator"):
        size(model_shape("bloom-176b"), trace, Slo(1, 1), 0.9, ["l40s"], 2)


def test_the_command_prints_a_row_per_accelerator() -> None:
    flags = ["size", "--model", "llama-3-8b", "--trace", str(AZURE), "--gpus", "h100=2.5,l40s=1", "--seconds", "30"]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    assert "h100" in done.output
    assert "l40s" in done.output
