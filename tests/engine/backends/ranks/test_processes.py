"""Tests ranks as processes: answers, what one that can't start says, one that is killed, one that stands still."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.engine.backends.ranks import runner as runner_module
from baton.engine.backends.ranks.followers import Followers
from baton.engine.backends.ranks.load import load_rank
from baton.engine.backends.ranks.memory import RanksStruct, dismiss
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.kernels.abi import native
from baton.protos.errors import CheckpointError, ConfigError, RankLost
from baton.protos.nouns import AdapterLimits, Sampling
from tests.conformance.checkpoints import make
from tests.engine.adapters.adapter_files import EVERYWHERE, write
from tests.engine.adapters.test_equality import hold
from tests.engine.backends.ranks.threads import SharedDriver, ending
from tests.thorough import later

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

GREEDY = Sampling(temperature=0.0, max_tokens=6)
PROMPTS = [[1, 2, 3], [4] * 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "qwen2")


@contextmanager
def ranks_of(model: Path, bound_s: float = 60.0, share: str = "tp") -> Iterator[RankRunner]:
    widths = dict.fromkeys(share.split("+"), 2)
    runner = load_runner(EngineConfig(str(model), threads=2, rank_bound_s=bound_s, **widths))
    assert isinstance(runner, RankRunner)
    with ending(runner):
        yield runner


SHARES = [
    ("qwen2", "tp"), later("mixtral", "ep"), later("qwen2", "cp"), later("qwen2", "pp"),
    later("qwen2", "tp+pp"), later("mixtral", "tp"), later("mixtral", "tp+pp"), later("gpt_oss", "ep"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "share"), SHARES)
def test_processes_answer_as_one_does_cost_as_much_and_leave_when_told(
    tmp_path: Path, kind: str, share: str
) -> None:
    model = make(tmp_path, kind)
    one = load_runner(EngineConfig(str(model), threads=1))
    alone = SharedDriver(one, 16).answer(PROMPTS, GREEDY)
    with ranks_of(model, share=share) as runner:
        assert SharedDriver(runner, 16).answer(PROMPTS, GREEDY) == alone
        assert one.work is not None
        assert runner.work is not None
        for cost in ("token_flops", "sample_flops", "pair_flops", "context_bytes", "step_bytes"):
            assert getattr(runner.work, cost) == pytest.approx(getattr(one.work, cost))


def test_a_rank_that_is_killed_is_told_of_at_once_and_ends_the_step(model: Path) -> None:
    heard, told = threading.Event(), list[RankLost]()
    with ranks_of(model) as runner:
        driver = SharedDriver(runner, 16)
        runner.watch(lambda error: (told.append(error), heard.set()))
        os.kill(runner.pids()[0], signal.SIGKILL)
        assert heard.wait(30)
        with pytest.raises(RankLost, match="rank 1 is gone"):
            driver.answer(PROMPTS, GREEDY)
    assert (told[0].rank, told[0].message) == (1, "rank 1 of 2 ended by itself (signal 9)")


@pytest.mark.thorough  # of a lost one: below
def test_ranks_that_were_told_to_leave_are_not_called_lost(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[RankLost]()
    with ranks_of(model) as runner:
        SharedDriver(runner, 16)
        runner.watch(told.append)
        watch = next(thread for thread in threading.enumerate() if thread.name == "ranks")

        def dismissed_and_seen(ranks: RanksStruct) -> None:
            dismiss(ranks)
            watch.join(60)  # as where this thread loses its core here
            assert not watch.is_alive()

        monkeypatch.setattr(runner_module, "dismiss", dismissed_and_seen)
    assert told == []


@pytest.mark.thorough  # of one that is killed in a step: above
def test_a_rank_that_ends_before_it_took_what_it_was_given_is_left_to_the_watch(model: Path) -> None:
    followers = Followers(EngineConfig(str(model), threads=1, tp=2))
    try:
        followers.await_ready(fingerprint := load_rank(EngineConfig(str(model), threads=1, tp=2), 0)[3])
        pid = followers.pids()[0]
        os.kill(pid, signal.SIGSTOP)
        memory = os.memfd_create("anything")
        followers.share(memory, 1)
        os.kill(pid, signal.SIGKILL)
        assert select.select([os.pidfd_open(pid)], [], [], 30)[0]
        followers.share(memory, 1)
    finally:
        followers.kill()
    assert fingerprint


@pytest.mark.parametrize("share", ["tp", later("pp")])
def test_a_rank_that_stands_still_is_lost_after_the_bound(model: Path, share: str) -> None:
    with ranks_of(model, 0.5, share) as runner:
        driver = SharedDriver(runner, 16)
        os.kill(runner.pids()[0], signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 1 is stuck, of 2 ranks") as caught:
            driver.answer(PROMPTS, GREEDY)
        assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("kind", "share", "rank"),
    [
        later("mixtral", "ep", 1),
        *(later("qwen2", "tp+pp", rank) for rank in (1, 2, 3)),
        later("mixtral", "tp+pp", 3),
    ],
)
def test_whoever_stands_still_among_experts_or_stages_is_the_one_that_is_named(
    tmp_path: Path, kind: str, share: str, rank: int
) -> None:
    with ranks_of(make(tmp_path, kind), 0.5, share) as runner:
        driver = SharedDriver(runner, 16)
        os.kill(runner.pids()[rank - 1], signal.SIGSTOP)
        with pytest.raises(RankLost, match=f"rank {rank} is stuck") as caught:
            driver.answer(PROMPTS, GREEDY)
        assert caught.value.rank == rank


def test_what_a_rank_cannot_load_is_the_leads_error(model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in model.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    followers = Followers(EngineConfig(str(damaged), threads=1, tp=2))
    (damaged / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        followers.await_ready("")
    followers.kill()


def test_widths_that_cannot_be_are_refused_before_a_process_starts(model: Path) -> None:
    with pytest.raises(ConfigError, match="tp is 9, and the model has 4 attention heads; use 1 to 4"):
        load_runner(EngineConfig(str(model), tp=9))
    with pytest.raises(ConfigError, match="pp is 9, and the model has 2 layers; use 1 to 2"):
        load_runner(EngineConfig(str(model), pp=9))
    with pytest.raises(ConfigError, match="ep is 2, and the model has no layers of experts; use 1"):
        load_runner(EngineConfig(str(model), ep=2))
    with pytest.raises(ConfigError, match="cp is 2 and pp is 2: cp goes with no other number of ranks"):
        load_runner(EngineConfig(str(model), cp=2, pp=2))


@pytest.mark.thorough
def test_an_adapter_reaches_every_process_and_a_rank_that_does_not_take_it_is_lost(
    model: Path, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "adapter", model, EVERYWHERE)
    limits = AdapterLimits(2, 1 << 30, 64)
    alone = load_runner(EngineConfig(str(model), threads=1, adapters=limits))
    runner = load_runner(EngineConfig(str(model), threads=2, tp=2, rank_bound_s=60.0, adapters=limits))
    assert isinstance(runner, RankRunner)
    try:
        found = []
        for each in (alone, runner):
            driver = SharedDriver(each, 16)
            found.append(driver.answer(PROMPTS, GREEDY, adapters=[hold(each, "a", adapter), ""]))
        assert found[0] == found[1]
        os.kill(runner.pids()[0], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 is gone"):
            hold(runner, "b", adapter)
    finally:
        runner.leave()
