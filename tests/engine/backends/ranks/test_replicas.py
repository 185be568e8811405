"""Copies of busy experts on real ranks: made between two steps, without a bit of a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from baton.engine.abilities import adapters_of
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.steps.expert_load import ExpertMeter
from baton.kernels.abi import native
from baton.protos.errors import ConfigError, RankLost
from baton.protos.nouns import AdapterLimits, Sampling
from tests.conformance.checkpoints import make, prompts
from tests.e2e.fleet import wait_for
from tests.engine.adapters.adapter_files import EXPERTS, MIXTRAL, write
from tests.engine.adapters.test_equality import hold
from tests.engine.backends.ranks.other_host import children, other_host
from tests.engine.backends.ranks.threads import SharedDriver, on_ranks
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

SPOKEN = Sampling(temperature=0.0, max_tokens=6, logprobs=2)
CASES = [
    ("gpt_oss", {"ep": 2}), ("mixtral", {"tp": 2, "quantization": "int8"}), ("gpt_oss", {"tp": 2, "pp": 2}),
    ("qwen3_moe", {"ep": 3, "quantization": "int4"}), ("mixtral", {"ep": 2, "dtype": "bfloat16"}),
    ("glm4_moe", {"ep": 2, "dtype": "float16"}), ("gpt_oss", {"ep": 4, "dtype": "float16"}),
]  # fmt: skip


def skewed(directory: Path, kind: str) -> Path:
    """A checkpoint whose routers, where they have biases, choose the first two experts for nearly all rows."""
    model = make(directory, kind)
    for file in model.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith("router.bias"):
                weight[:2] += 20.0
        save_file(weights, file, {"format": "pt"})
    return model


def looking_often(runner: RankRunner, rows: int) -> None:
    assert runner._balancer is not None
    runner._balancer._look_rows = rows


@pytest.mark.parametrize(("kind", "fields"), first_now(CASES, 2), ids=str)
def test_answers_are_one_ranks_before_and_behind_a_move_and_loads_are_evener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    model, widths = str(skewed(tmp_path / "model", kind)), {"tp", "ep", "pp"} & fields.keys()
    forms = {key: value for key, value in fields.items() if key not in widths}
    forms["cache_dir"] = str(tmp_path / "cache")
    alone = load_runner(EngineConfig(model, threads=1, **forms))
    own = {key: fields[key] for key in widths} | forms
    runner = on_ranks(alone.spec, EngineConfig(model, threads=1, rank_bound_s=60.0, expert_replicas=1, **own))
    try:
        looking_often(runner, 60)
        asked = [prompt[:90] for prompt in prompts(alone.spec.vocab_size, 5)]
        one, many = SharedDriver(alone, 64, chunk=40), SharedDriver(runner, 64, chunk=40)
        for _ in range(2):
            assert many.answer(asked, SPOKEN) == one.answer(asked, SPOKEN)
            assert many.logprobs == one.logprobs
            assert bytes(many.memory.view()) == bytes(one.memory.view())
        rows = runner.expert_rows()
        assert rows is not None
        assert sum(rows.by_rank) == sum(rows.by_expert)
        assert rows.copies.copies > 0
        later = ExpertMeter(runner).load()  # of the next role
        assert later is not None
        assert (later.copies.copies, later.copies.moves) == (rows.copies.copies, 0)
        assert rows.copies.imbalance < rows.copies.imbalance_at_home
        if kind == "gpt_oss" and fields == {"ep": 2}:
            assert rows.copies.imbalance < 1.1 < 1.25 < rows.copies.imbalance_at_home
    finally:
        runner.leave()


def test_adapters_go_with_the_copies_of_their_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held before copies are made, and while they are there, by ranks that had none of the copied experts."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    model = make(tmp_path / "model", "mixtral")
    first, second = (write(tmp_path / f"{n}", model, (EXPERTS, *MIXTRAL), rank=4, seed=n) for n in (1, 2))
    config = EngineConfig(str(model), threads=1, adapters=AdapterLimits(2, 1 << 30, 64), rank_bound_s=60.0)
    alone = load_runner(config)
    host = adapters_of(alone)
    assert host is not None
    runner = on_ranks(alone.spec, msgspec.structs.replace(config, ep=2, expert_replicas=1), host.base)
    try:
        looking_often(runner, 60)
        asked = [prompt[:90] for prompt in prompts(alone.spec.vocab_size, 4)]
        one, many = SharedDriver(alone, 64, chunk=40), SharedDriver(runner, 64, chunk=40)
        names = ["", ""]
        for at, directory in enumerate((first, second)):
            names[at], there = (hold(each, f"a{at}", directory) for each in (alone, runner))
            of_rows = [names[0], "", names[1], there]
            bare, found = (one.answer(asked, SPOKEN, adapters=of) for of in ([], of_rows))
            assert [many.answer(asked, SPOKEN, adapters=of) for of in ([], of_rows)] == [bare, found]
            assert found != bare
            assert many.logprobs == one.logprobs
            rows = runner.expert_rows()
            assert rows is not None
            assert rows.copies.copies > 0
    finally:
        runner.leave()


def test_a_lead_that_cannot_place_its_copies_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(skewed(tmp_path, "gpt_oss"))
    alone = load_runner(EngineConfig(model, threads=1))
    runner = on_ranks(alone.spec, EngineConfig(model, threads=1, ep=2, rank_bound_s=60.0, expert_replicas=1))
    try:
        looking_often(runner, 60)

        def unreadable(note: object) -> None:
            raise OSError("no such checkpoint any more")

        monkeypatch.setattr(runner._own_experts, "place", unreadable)
        driver = SharedDriver(runner, 64, chunk=40)
        asked = [prompt[:90] for prompt in prompts(alone.spec.vocab_size, 5)] * 3
        with pytest.raises(RankLost, match="rank 0 couldn't place copies of experts: no such checkpoint"):
            driver.answer(asked, SPOKEN)
    finally:
        runner.leave()


@pytest.mark.thorough
def test_ranks_of_two_hosts_place_copies_and_end_together(tmp_path: Path) -> None:
    model = str(skewed(tmp_path, "gpt_oss"))
    alone = load_runner(EngineConfig(model, threads=1))
    asked = [prompt[:60] for prompt in prompts(alone.spec.vocab_size, 4)]
    wanted = SharedDriver(alone, 64, chunk=40).answer(asked, SPOKEN)
    with other_host() as (address, agent):
        config = EngineConfig(model, threads=1, ep=2, rank_bound_s=60.0, rank_hosts=(address,), expert_replicas=1)
        runner = load_runner(config)
        assert isinstance(runner, RankRunner)
        try:
            looking_often(runner, 60)
            driver = SharedDriver(runner, 64, chunk=40)
            assert [driver.answer(asked, SPOKEN) for _ in range(3)] == [wanted] * 3
            rows = runner.expert_rows()
            assert rows is not None
            assert sum(rows.by_rank) == sum(rows.by_expert)
            assert rows.copies.imbalance < rows.copies.imbalance_at_home
        finally:
            runner.leave()
        wait_for(lambda: not children(agent))


@pytest.mark.parametrize(
    ("widths", "said"),
    [
        ({}, "one rank has all experts; set worker.ep, or 0"),
        ({"pp": 2}, "pp is 2 divides no experts among ranks; set worker.ep"),
        ({"ep": 2, "expert_replicas": 65}, "expert_replicas is 65; use 0 to 64"),
    ],
)
def test_places_that_nothing_could_use_are_refused_with_what_works(
    tmp_path: Path, widths: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_runner(EngineConfig(str(make(tmp_path, "mixtral")), **({"expert_replicas": 1} | widths)))
    assert refused.value.param == "expert_replicas"
