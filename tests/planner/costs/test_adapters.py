"""LoRA adapters in a simulation: by a factor, by a profile's own measurement, or by a running cluster's."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from baton.cost.profiles import load_profile
from baton.planner.costs.adapter_mix import mix_of
from baton.planner.costs.adapters import AdapterCosts, by_factor, measured_by, parse_factor
from baton.planner.costs.paced_file import to_toml
from baton.planner.costs.speculation import with_acceptance
from baton.planner.costs.worker import worker_costs
from baton.protos.errors import ConfigError
from baton.protos.measurements import AdapterCurve

COSTS = worker_costs("roofline:llama-3-8b@h100")
CURVE = AdapterCurve(2e-7, 1e-5, 16.0)
HALF, NONE = (0.25, 0.25), ()  # adapters' shares of the tokens


def test_a_factor_makes_steps_dearer_by_the_adapters_share_of_the_tokens() -> None:
    same, half = by_factor(COSTS, 0.5, 1.0), by_factor(COSTS, 0.5, 1.4)
    assert same is COSTS
    assert half.step_seconds(0, 0.0, 16, 0.0) == pytest.approx(1.2 * COSTS.step_seconds(0, 0.0, 16, 0.0))
    assert half.step_seconds(512, 0.0, 0, 0.0) == pytest.approx(1.2 * COSTS.step_seconds(512, 0.0, 0, 0.0))
    assert half.context == COSTS.context  # attention is the model's own
    assert "50% of tokens on adapters at 1.4 times" in half.about


def test_the_adapters_to_expect_in_a_step_are_those_of_sequences_drawn_by_their_shares() -> None:
    shares, rng, counts = (0.3, 0.15, 0.05), random.Random(1), (1, 4, 20)
    mix = mix_of(CURVE, shares)
    drawn = {n: [rng.choices(range(4), (*shares, 0.5), k=n) for _ in range(4000)] for n in counts}
    for n, steps in drawn.items():
        seen = sum(len({adapter for adapter in step if adapter < 3}) for step in steps) / len(steps)
        assert mix.distinct[n] == pytest.approx(seen, rel=0.05)
    assert mix.distinct[0] == 0
    assert mix.seconds(0, 1 << 20) == pytest.approx(3 * 1e-5 * 16), "however many sequences, all adapters at most"


def test_a_measured_cost_is_added_by_rows_and_different_adapters() -> None:
    found = AdapterCosts(measured={"decode": CURVE}).on(COSTS, HALF, "decode")
    distinct = 2 * (1 - 0.75**8)
    more = 8 * 0.5 * 2e-7 * 16 + distinct * 1e-5 * 16
    assert found.step_seconds(0, 0.0, 8, 100.0) == pytest.approx(COSTS.step_seconds(0, 0.0, 8, 100.0) + more)
    prompt = 512 * 0.5 * 2e-7 * 16 + 0.5 * 1e-5 * 16
    assert found.step_seconds(512, 9.0, 0, 0.0) == pytest.approx(COSTS.step_seconds(512, 9.0, 0, 0.0) + prompt)
    assert found.curve.prefill_token == pytest.approx(COSTS.curve.prefill_token + 0.5 * 2e-7 * 16)
    drafting = with_acceptance(found, (0.8,))
    assert drafting.step_seconds(0, 0.0, 8, 0.0) > with_acceptance(COSTS, (0.8,)).step_seconds(0, 0.0, 8, 0.0)
    assert AdapterCosts(measured={"decode": CURVE}).on(COSTS, NONE, "decode") is COSTS


def test_a_profile_keeps_what_was_measured_and_a_flag_goes_before_it(tmp_path: Path) -> None:
    file = tmp_path / "measured.toml"
    file.write_text(to_toml(msgspec.structs.replace(COSTS, adapters=CURVE), 1000, 8192, 512))
    again = worker_costs(str(file))
    assert again.adapters == CURVE
    own, given = AdapterCosts(), AdapterCosts(factor=1.5)
    assert own.on(again, HALF, "decode").mix is not None
    assert given.on(again, HALF, "decode").mix is None
    assert "1.5 times" in given.about(HALF, again, again)
    assert "3.2 µs a row and 160 µs an adapter of a step (rank 16)" in own.about(HALF, again, again)
    other = AdapterCosts(measured={"prefill": AdapterCurve(1e-6, 0.0, 10.0), "decode": CURVE})
    assert "to prompts 10 µs a row" in other.about(HALF, again, again)


def test_ranks_divide_the_rows_of_adapters(tmp_path: Path) -> None:
    text = to_toml(msgspec.structs.replace(COSTS, adapters=CURVE), 1000, 8192, 512)
    for shared, adapter in (("tp", 5e-6), ("pp", 1e-5)):
        file = tmp_path / f"{shared}.toml"
        file.write_text(f'{text}\n[ranks]\nshared = "{shared}"\nwidths = [1, 2]\n')
        found = load_profile(f"{file}@{shared}2").adapters
        assert found is not None
        assert (found.row, found.adapter) == (pytest.approx(1e-7), pytest.approx(adapter))


@pytest.mark.parametrize("line", ["row = -1.0", "row = inf", "nothing = 1.0"])
def test_a_profile_whose_adapters_make_no_sense_is_refused_by_field(tmp_path: Path, line: str) -> None:
    text = to_toml(msgspec.structs.replace(COSTS, adapters=CURVE), 1000, 8192, 512)
    file = tmp_path / "odd.toml"
    file.write_text(text.replace("row = 2e-07", line))
    with pytest.raises(ConfigError, match="adapters"):
        load_profile(str(file))


def test_a_cluster_without_adapters_says_so() -> None:
    worker = {"role": "decode", "adapter_cost": None}
    with pytest.raises(ConfigError, match="no adapters seen by the workers of that cluster"):
        measured_by({"workers": [worker]})
    cost = {"row_s": 1e-7, "adapter_s": 1e-5, "rank": 8.0}
    found = measured_by({"workers": [worker, worker | {"adapter_cost": cost}, worker | {"adapter_cost": cost}]})
    assert found == {"decode": AdapterCurve(1e-7, 1e-5, 8.0)}
    assert AdapterCosts().about(NONE, COSTS, COSTS) == "adapters: no adapters seen in the trace"
    assert "nothing is added" in AdapterCosts().about(HALF, COSTS, COSTS)
    assert AdapterCosts().on(COSTS, HALF, "decode") is COSTS


@pytest.mark.parametrize("text", ["0.5", "cheap", "inf", "nan", "-2"])
def test_odd_factors_are_refused_by_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--adapter-cost") as refused:
        parse_factor(text)
    assert refused.value.param == "adapter_cost"
    assert parse_factor("1.25") == 1.25
