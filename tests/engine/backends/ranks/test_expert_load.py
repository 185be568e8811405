"""Ranks that have experts each count what goes to them: every row once, by the expert that the router chose."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.steps.expert_load import ExpertMeter
from baton.kernels.abi import native
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.engine.backends.ranks.threads import SharedDriver, on_ranks

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [list(range(3, 90)), [4] * 10]
LAYERS, EXPERTS, CHOSEN = 2, 5, 2  # of the checkpoint
ROWS = sum(map(len, PROMPTS)) + len(PROMPTS) * (4 - 1)  # that all layers but the last compute
READ = len(PROMPTS) * 4  # rows that choose a token: the last layer's experts compute no others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "mixtral")


@pytest.mark.parametrize("widths", [{"ep": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_every_row_that_a_layer_computes_is_counted_at_each_expert_it_went_to(
    model: Path, widths: dict[str, int]
) -> None:
    spec = load_runner(EngineConfig(str(model), threads=1)).spec
    runner = on_ranks(spec, EngineConfig(str(model), threads=1, rank_bound_s=60.0, **widths))  # type: ignore[arg-type]
    try:
        driver, meter = SharedDriver(runner, 32), ExpertMeter(runner)
        load = meter.load()
        assert load is not None
        assert (load.rows, load.imbalance) == ((0, 0), 0.0)
        driver.answer(PROMPTS, GREEDY)
        load, rows = meter.load(), runner.expert_rows()
        assert load is not None
        assert rows is not None
        each = rows.by_expert
        assert sum(each) == (ROWS * (LAYERS - 1) + READ) * CHOSEN
        assert load.rows == rows.by_rank == (sum(each[:2]), sum(each[2:]))
        assert (load.busiest, load.experts) == (max(each), EXPERTS)
        assert load.imbalance == pytest.approx(max(each) * EXPERTS / sum(each))
        later = ExpertMeter(runner).load()  # of the next role
        assert later is not None
        assert later.rows == (0, 0)
    finally:
        runner.leave()


@pytest.mark.parametrize("share", ["cp", "pp"])
def test_ranks_that_have_all_experts_of_their_layers_count_none(model: Path, share: str) -> None:
    spec = load_runner(EngineConfig(str(model), threads=1)).spec
    runner = on_ranks(spec, EngineConfig(str(model), threads=1, **{share: 2}))
    try:
        SharedDriver(runner, 4)
        assert runner.expert_rows() is None
        assert ExpertMeter(runner).load() is None
    finally:
        runner.leave()
    assert ExpertMeter(None).load() is None
