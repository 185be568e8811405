"""Ranks on cards, each a process with its own session on the SIMT shim: one card's bits, ranks that are lost."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.engine.backends.cuda.card_locks import take
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.cuda.warming import sizes
from baton.engine.backends.ranks.cards import load as cards_load
from baton.engine.backends.ranks.cards.runner import CardRanksRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner, SequenceStep, StepPlan
from baton.kernels.abi import native
from baton.kernels.cuda import library
from baton.kv.memory.host_pages import PageMemory
from baton.protos.errors import ConfigError, RankLost, StartupError
from baton.protos.nouns import AdapterLimits, Sampling
from tests.conformance.checkpoints import make
from tests.engine.backends.ranks.threads import SharedDriver, ending
from tests.kernels.compilers import needs_compiler
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

SMALL = {"num_hidden_layers": 2, "vocab_size": 203, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
PROMPTS = [[5, 17, 90, 3, 44, 61, 7], [int(i * 7 % 199) for i in range(21)]]
GREEDY = Sampling(temperature=0.0, max_tokens=4)
ASKED = (
    Sampling(temperature=0.0, max_tokens=4, logprobs=3),
    Sampling(temperature=0.8, top_p=0.95, seed=11, max_tokens=4, repetition_penalty=1.1),
    Sampling(temperature=0.0, max_tokens=2, prompt_logprobs=2, pooling="mean"),
)
FLAGS = 128  # exchange.h: where a room's head has the flags of rank 0


@pytest.fixture(autouse=True)
def on_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SIMT_ENV, "1")
    library.device.cache_clear()
    with needs_compiler():
        library.device()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "llama2", **SMALL)


def config(model: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(str(model), **({"dtype": "bfloat16", "threads": 1, "device": "cuda"} | fields))


@contextmanager
def on_cards(model: Path, tp: int = 2, bound_s: float = 60.0, **fields: Any) -> Iterator[CardRanksRunner]:
    runner = load_runner(config(model, tp=tp, rank_bound_s=bound_s, **fields))
    assert isinstance(runner, CardRanksRunner)
    with ending(runner):
        yield runner


@contextmanager
def on_one(model: Path, **fields: Any) -> Iterator[CudaRunner]:
    runner = load_runner(config(model, **fields))
    assert isinstance(runner, CudaRunner)
    try:
        yield runner
    finally:
        runner.close()


CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("llama2", 2, {}, {}),
    ("llama2", 3, {}, {"quantization": "int8", "kv_cache_dtype": "int8"}),  # two ranks have the same KV head
    ("qwen3", 2, {"tie_word_embeddings": True, "head_dim": 32}, {"quantization": "int4", "kv_cache_dtype": "fp8"}),
    ("qwen2", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, {}),
    ("mistral", 4, {"sliding_window": 8}, {}),
]


@pytest.mark.parametrize(("kind", "tp", "changes", "fields"), first_now(CASES, 1), ids=str)
def test_ranks_on_cards_have_the_bits_of_one_card(
    tmp_path: Path, kind: str, tp: int, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    model = make(tmp_path / "model", kind, **(SMALL | changes))
    fields = {"cache_dir": str(tmp_path / "cache")} | fields
    with on_one(model, **fields) as alone, on_cards(model, tp, **fields) as ranks:
        assert ranks.spec.fingerprint == alone.spec.fingerprint
        assert ranks.spec.layout == alone.spec.layout  # so that either hands over to the other
        one, many = (SharedDriver(runner, 16, chunk=8) for runner in (alone, ranks))
        for sampling in ASKED:
            assert many.answer(PROMPTS, sampling) == one.answer(PROMPTS, sampling)
        assert (many.logprobs, many.read) == (one.logprobs, one.read)
        assert bytes(many.memory.view()) == bytes(one.memory.view())
        assert ranks.counts()["replayed"] > ranks.counts()["captured"] > 0


def test_of_a_start_each_size_of_decodes_is_captured_once_and_nothing_else(model: Path) -> None:
    with on_cards(model) as ranks:
        driver = SharedDriver(ranks, 16, chunk=8)
        ranks.warms = True
        ranks.warm(2, 8, 3)  # a chunk so small that a step with it would have a graph
        assert ranks.counts()["captured"] == len(sizes(2)) == 2
        driver.answer(PROMPTS, GREEDY)
        assert ranks.counts()["replayed"] > 2


def test_a_follower_that_cannot_use_the_pages_ends_the_start(model: Path) -> None:
    with on_cards(model) as ranks:
        memory = PageMemory.create(4, ranks.spec.layout.page_bytes)
        ranks.bind(memory.view(), 4)
        with pytest.raises(StartupError, match="rank 1 died at start"):
            ranks.open_pages(memory.fd, 2 * memory.bytes)  # more than there are


@pytest.mark.thorough
def test_a_cards_pages_take_the_memory_that_they_have_and_no_more(model: Path) -> None:
    with on_cards(model) as ranks:
        memory = PageMemory.create(4096, ranks.spec.layout.page_bytes)
        device = library.device()
        assert device is not None
        before = device.allocate(16 << 20)  # behind all gaps, as what comes next
        ranks.bind(memory.view(), 4096)
        after = device.allocate(16 << 20)
        own = memory.bytes // 2  # the heads of one of two ranks
        assert own <= after - before - (16 << 20) <= own + (64 << 10)


def step(seq: int, tokens: list[int], start: int, pages: list[int]) -> StepPlan:
    return StepPlan((SequenceStep(seq, tokens, start, pages, targets=[*tokens[1:], 0], pool=True),))


def chunks(rows: int) -> Iterator[StepPlan]:
    """A prompt, the same pages read by a sequence that the cards know nothing of, and ``rows`` tokens at once."""
    tokens = [int(i * 13 % 199) for i in range(rows)]
    yield step(1, tokens[:20], 0, [3, 1])
    yield step(2, tokens[20:29], 20, [3, 1])
    yield step(3, tokens, 0, [(7 * page + 2) % 24 for page in range(-(-rows // 16))])


@pytest.mark.parametrize("rows", first_now([40, 300], 1), ids=["by graph", "layer by layer"])
def test_pages_that_others_wrote_are_read_and_prompts_go_back(model: Path, rows: int) -> None:
    with on_one(model) as alone, on_cards(model, kv_cache_dtype="auto") as ranks:
        runners: tuple[Runner, ...] = (alone, ranks)
        one, many = (SharedDriver(runner, 24) for runner in runners)
        for plan in chunks(rows):
            want, have = (runner.run(plan) for runner in runners)
            [seq] = [item.seq for item in plan.items]
            assert have.scored == want.scored
            assert (have.pooled[seq].last == want.pooled[seq].last).all()
        assert ranks.counts()["admitted"] == 2
        assert bytes(many.memory.view()) == bytes(one.memory.view())


def test_a_rank_that_is_killed_in_a_meeting_ends_the_step_without_a_bound(model: Path) -> None:
    heard, told = threading.Event(), list[RankLost]()
    with on_cards(model, bound_s=0.0) as runner:
        driver = SharedDriver(runner, 16)
        driver.answer(PROMPTS, GREEDY)
        runner.watch(lambda error: (told.append(error), heard.set()))
        [pid] = runner.pids()
        assert runner._card.exchange is not None
        room = runner._card.exchange.rooms[1]
        flag = ctypes.c_uint64.from_address(room + FLAGS)  # rank 0's, in the other's room
        before = flag.value
        os.kill(pid, signal.SIGSTOP)

        def kill() -> None:
            while flag.value == before:
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        with pytest.raises(RankLost, match="rank 1 is gone, of 2 ranks") as caught:
            driver.answer(PROMPTS, GREEDY)
        thread.join()
        assert caught.value.rank == 1
        assert heard.wait(30)
    assert told[0].message == "rank 1 of 2 ended by itself (signal 9)"


@pytest.mark.thorough  # in a kernel: above, and tests/kernels/cuda/test_rank_meetings.py
def test_a_rank_that_stands_still_is_lost_after_the_bound(model: Path) -> None:
    with on_cards(model, tp=3, bound_s=0.5) as runner:
        driver = SharedDriver(runner, 16)
        os.kill(runner.pids()[1], signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 2 is stuck, of 3 ranks"):
            driver.answer(PROMPTS, GREEDY)


@pytest.mark.thorough
def test_a_step_that_fails_on_a_card_is_a_rank_that_is_lost(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_cards(model) as runner:
        driver = SharedDriver(runner, 16)

        def fail(*_: object) -> None:
            raise library.DeviceError("session_run: out of memory (status 2)")

        monkeypatch.setattr(runner._card, "run", fail)
        runner.warms = True
        with pytest.raises(
            ConfigError, match=r"no room for a step of 4 sequences, 9 drafts and 8 tokens: .* memory"
        ):
            runner.warm(4, 8, 9)
        with pytest.raises(RankLost, match=r"rank 0: the step failed on its card: session_run: out of memory"):
            driver.answer(PROMPTS, GREEDY)


def refused(model: Path, says: str, **fields: Any) -> None:
    with pytest.raises(ConfigError, match=says):
        load_runner(config(model, **fields))


def test_what_ranks_on_cards_cannot_do_is_refused_by_name_before_a_process_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(model, "pp is 2: ranks on cards share a model's columns alone; set pp to 1", pp=2)
    refused(model, "tp is 2 and pp is 2: .* set pp to 1", tp=2, pp=2)
    refused(model, "cp is 2: ranks on cards share .* set cp to 1", cp=2)
    refused(model, r"without worker\.adapters", tp=2, adapters=AdapterLimits(2, 1 << 30, 64))
    refused(model, r"without worker\.cuda_step", tp=2, cuda_step="mega")
    refused(model, "tp is 2: on cards attention reads KV as bf16, int8 or fp8", tp=2, dtype="float32")
    refused(model, "tp is 5, and the model has 4 attention heads; use 1 to 4", tp=5)
    refused(make(tmp_path / "experts", "mixtral"), "layers of experts run on one card; use 1", tp=2)
    monkeypatch.setattr(cards_load, "cards", lambda device: 3)
    refused(model, r"tp is 4: that is 4 cards, and this process sees 3 .* use 1 to 3, or device cpu", tp=4)
    monkeypatch.setattr(cards_load, "kernels_or_none", lambda: None)
    refused(model, "ranks on cards need the engine's own kernels", tp=2)


@pytest.mark.thorough  # of the locks alone: tests/engine/backends/cuda/test_card_locks.py
def test_each_worker_takes_cards_of_its_own_and_is_refused_where_too_few_are_free(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards_load, "cards", lambda device: 5)
    monkeypatch.setattr(cards_load, "take", partial(take, patience_s=0, folder=tmp_path))
    used, use = list[int](), cards_load.use_card
    monkeypatch.setattr(cards_load, "use_card", lambda device, index: (used.append(index), use(device, index)))
    with on_cards(model):
        with on_cards(model):
            assert used == [0, 2]  # of the leads; their followers have 1 and 3
            refused(model, "tp is 2: .* of the 5 .* other workers have 4 .card 0: process", tp=2)
        with on_cards(model):
            assert used == [0, 2, 2]


def test_cards_that_cannot_write_to_one_another_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards_load, "unreachable", lambda device, indices: [1])
    with pytest.raises(ConfigError, match=r"tp is 2: card 0 can't write to the memory of card 1"):
        cards_load.load_card(config(model, tp=2), 0, (0, 1))
