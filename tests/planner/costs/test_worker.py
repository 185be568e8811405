"""Tests worker costs: roofline, operator timings, paced profiles."""

from pathlib import Path

import msgspec
import pytest

from baton.cost.profiles import load_profile
from baton.planner.costs.model_shape import model_shape
from baton.planner.costs.operators import PrefillChunk, load_operators
from baton.planner.costs.paced_file import to_toml
from baton.planner.costs.worker import accelerators, from_operators, roofline, worker_costs
from baton.protos.errors import ConfigError

LLAMA = Path(__file__).parents[2] / "data" / "vllm_real" / "rtx4090_llama-3.1-8b" / "profile"


def test_every_data_sheet_gives_a_worker() -> None:
    for name, sheet in accelerators().items():
        costs = roofline(model_shape("llama-3-8b"), name, sheet, 1)
        assert costs.kv_tokens > 40_000
        assert 0.001 < costs.step_seconds(0, 0.0, 1, 1000.0) < 0.05


def test_decode_is_bound_by_bytes_and_prefill_by_flops() -> None:
    a100, h200 = worker_costs("roofline:llama-3-70b@a100x8"), worker_costs("roofline:llama-3-70b@h200x8")
    one, many = a100.step_seconds(0, 0.0, 1, 0.0), a100.step_seconds(0, 0.0, 64, 0.0)
    assert many < 1.1 * one
    prompt = 2048 * 1024.0
    assert a100.step_seconds(2048, prompt, 0, 0.0) > 2.5 * h200.step_seconds(2048, prompt, 0, 0.0)


@pytest.mark.parametrize(
    ("model", "gpu", "tokens", "prompt_ms", "token_ms"),
    [  # medians of Splitwise's measurements (splitwise-sim, MIT), one prompt at a time
        ("llama2-70b@a100x2", "a100", 512, 197, 54.9),
        ("llama2-70b@a100x2", "a100", 2048, 688, 54.9),
        ("llama2-70b@h100x2", "h100", 512, 84, 37.0),
        ("llama2-70b@h100x2", "h100", 2048, 310, 37.4),
    ],
)
def test_the_roofline_is_near_what_was_measured(
    model: str, gpu: str, tokens: int, prompt_ms: float, token_ms: float
) -> None:
    costs = worker_costs(f"roofline:{model}")
    assert costs.step_seconds(tokens, tokens**2 / 2, 0, 0.0) * 1e3 == pytest.approx(prompt_ms, rel=0.30)
    assert costs.step_seconds(0, 0.0, 1, tokens) * 1e3 == pytest.approx(token_ms, rel=0.15)


def test_operator_timings_become_a_curve_close_to_them() -> None:
    profile = load_operators(str(LLAMA))
    costs = from_operators(profile)
    for n, context in ((8, 1000), (32, 1000), (32, 2000)):
        seen = profile.step_seconds([], [context] * n)
        assert costs.step_seconds(0, 0.0, n, float(n * context)) == pytest.approx(seen, rel=0.25)
    seen = profile.step_seconds([PrefillChunk(1024, 0)], [])
    assert costs.step_seconds(1024, 1024**2 / 2, 0, 0.0) == pytest.approx(seen, rel=0.25)


def test_a_profile_written_is_the_profile_read(tmp_path: Path) -> None:
    costs = worker_costs("roofline:llama-3-8b@h100")
    file = tmp_path / "own.toml"
    file.write_text(to_toml(costs, 128256, 8192, 2048))
    assert load_profile(str(file)).prefill_chunk == 2048
    again = worker_costs(str(file))
    assert again.step_seconds(0, 0.0, 8, 8000.0) == pytest.approx(costs.step_seconds(0, 0.0, 8, 8000.0), rel=0.02)
    assert again.transfer.per_byte == pytest.approx(costs.transfer.per_byte, rel=0.01)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("roofline:llama-3-70b@a100", "at least 2"),
        ("roofline:llama-3-70b@tpu", "h100"),
        ("roofline:no-model@h100", "llama-3-70b"),
        ("nowhere", "laptop"),
    ],
)
def test_what_cannot_be_is_refused_with_the_choices(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        worker_costs(name)


def test_a_profile_says_what_it_is_about_whatever_is_in_the_models_name(tmp_path: Path) -> None:
    costs = msgspec.structs.replace(worker_costs("laptop"), about='C:\\Users\\ada\\"mine"')
    file = tmp_path / "own.toml"
    file.write_text(to_toml(costs, 128256, 8192, 2048))
    assert worker_costs(str(file)).about == costs.about
