"""Tests what a profile says of ranks: each width that it names can be run, no other; a meeting is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.meetings import measured_meeting
from baton.cluster.config import load_config
from baton.console.planning.rank_costs import MOST, costs_of, rank_costs_of, runnable_widths
from baton.cost.profiles import RankCosts, load_profile
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.shares import Widths
from baton.planner.budget import Budget, of_widths, spend
from baton.planner.costs.paced_file import to_toml
from baton.planner.costs.worker import from_curve, worker_costs
from baton.protos.errors import ConfigError
from baton.protos.measurements import StepCurve, TransferCurve
from tests.conformance.checkpoints import make
from tests.engine.test_models import program
from tests.kernels.conftest import needs_native
from tests.planner.test_budget import planned
from tests.thorough import later

KINDS = ["deepseek_v2", "gemma2", "gpt_oss", "llama", "mixtral", "olmo2", "phi3", "qwen2", "qwen3_moe"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", ["tp", "cp", "pp", "ep"])
def test_every_width_that_a_profile_names_can_be_run_and_no_other(kind: str, shared: str) -> None:
    model = program(kind, num_hidden_layers=4)
    # tp 1 stands for a worker that has ranks of no kind yet
    own = Widths() if shared == "tp" else Widths(**{shared: 2})
    found = costs_of(model, own, 1e-5)
    named = (1,) if found is None else found.widths
    for count in range(1, MOST + 1):
        widths = Widths(**{shared: count})
        if count in named:
            widths.require(model)
            continue
        with pytest.raises(ConfigError):
            widths.require(model)
    assert found is None or found.meetings > 0


@pytest.mark.parametrize(
    ("kind", "own", "most"), [("qwen2", Widths(), 3), later("mixtral", Widths(ep=2), 4)], ids=["tp", "ep"]
)
def test_a_recommended_width_is_one_that_can_be_run(tmp_path: Path, kind: str, own: Widths, most: int) -> None:
    model = program(kind, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=4, head_dim=16)
    ranks = costs_of(model, own, 1e-5)
    assert ranks is not None
    curve = StepCurve(0.05, 2e-4, 1e-9, 1e-3, 1e-7)
    measured = from_curve("a CPU", curve, 400_000, 1024, TransferCurve(0.0, 0.0))
    file = tmp_path / "measured.toml"
    file.write_text(to_toml(type(measured)(**fields(measured) | {"ranks": ranks}), 4096, 131_072, 512))
    assert load_profile(str(file)).ranks == ranks
    asked = [1, 2, 3, 4, 6]
    found, tried = spend(Budget(accelerators=12), of_widths(str(file), asked), planned)
    by_width = dict(zip(asked, tried, strict=True))
    assert {width for width, each in by_width.items() if each.ratio} == {width for width in asked if width <= most}
    listed = ", ".join(str(width) for width in range(1, most + 1))
    assert f"{own.field} can't be 6; use {own.field} {listed}" in by_width[6].reason
    best = next(each for each in tried if each.goodput == found.chosen.score.goodput)
    costs = worker_costs(best.profile)
    assert costs.ranks is not None
    Widths(**dict(costs.settings)).require(model)  # type: ignore[arg-type]


def fields(costs: object) -> dict[str, object]:
    return {name: getattr(costs, name) for name in costs.__struct_fields__}  # type: ignore[attr-defined]


def test_the_widths_of_each_kind_that_a_model_runs_on_are_said_in_words(tmp_path: Path) -> None:
    model = make(tmp_path, "mixtral", num_attention_heads=4, num_key_value_heads=2)
    words = runnable_widths(str(model))
    assert words == "tp 1 to 4, cp 1 to 64, pp 1 to 2, ep 1 to 5"
    assert runnable_widths(str(model / "config.json")) == words
    assert runnable_widths("llama-3-70b") == ""
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "nosuch"}')
    assert "none, " in runnable_widths(str(tmp_path / "strange"))
    for each in words.split(", "):
        kind, _, most = each.partition(" 1 to ")
        Widths(**{kind: int(most)}).require(program_for(ModelConfig.read(model)))


@pytest.mark.thorough
@needs_native
def test_a_meeting_is_measured_and_a_paced_cluster_has_none() -> None:
    seconds = measured_meeting()
    assert seconds is not None
    assert 0 < seconds < 1
    assert rank_costs_of(load_config(flags={"worker": {"device": "paced:zero"}}, search=Path("/nowhere"))) is None
    assert RankCosts(meetings=3, meeting_s=seconds).waits(1) == 0
