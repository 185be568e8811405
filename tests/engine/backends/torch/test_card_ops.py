"""Torch's ops on a card: KV mirrored there, FlashInfer where a trial takes it. The card is the CPU here, the
library a stand-in with its signatures that really computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.backends.cuda import op_trials
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.torch import card_ops, card_pages, flash_infer
from baton.engine.backends.torch.batch import BatchBuilder
from baton.engine.backends.torch.card_ops import ATTENTION, DRAW, CardOps, OpChoice, Sizes, choices_on, ops_on
from baton.engine.backends.torch.card_pages import CardPages
from baton.engine.backends.torch.flash_infer import AttentionShape, FlashInferDecode, FlashInferDraw, shape_of
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec, SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.kernels.abi.build import CACHE_ENV
from baton.kernels.sample.reference import sample
from baton.kv.layout.page import layout_for
from baton.protos.errors import BatonError, ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.engine.backends.torch import fake_flashinfer

SMALL = {"num_hidden_layers": 2, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
PROMPTS = [[5, 17, 90, 3, 44, 61, 7], [int(i * 7 % 199) for i in range(50)], [9] * 16]
L4 = Gpu("NVIDIA L4", (8, 9), (13, 0), 24 << 30)
SHAPE = AttentionShape(4, 2, 16, "bfloat16", 0.25, ((0, 0.0), (24, 30.0)))
TINY = Sizes(((2, 37), (1, 16)), (3,), 64)
SLOW, FAST = 9.0, 2.0
_HAS_NVCC = card_ops._has_nvcc


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", fake_flashinfer.sampling)
    monkeypatch.setattr(flash_infer, "WORKSPACE_BYTES", 64)
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    timed(monkeypatch, [FAST, SLOW])


def timed(monkeypatch: pytest.MonkeyPatch, pattern: list[float]) -> None:
    """FlashInfer's time, then torch's."""
    calls: list[int] = []

    def microseconds(call: Callable[[], object], device: str) -> float:
        call()
        calls.append(1)
        return pattern[(len(calls) - 1) % 2]

    monkeypatch.setattr(op_trials, "_microseconds", microseconds)


class Model:
    """A checkpoint's program and weights, float32 but for the KV that FlashInfer takes."""

    def __init__(self, directory: Path, kind: str, **changes: Any) -> None:
        directory = make(directory, kind, **(SMALL | changes))
        self.program = program_for(ModelConfig.read(directory))
        self.weights = dict(Checkpoint(directory).weights(self.program.weights, torch.bfloat16, "cpu"))
        self.spec = ModelSpec("", layout_for("bfloat16", self.program.groups), 256, self.program.vocab_size, ())

    def runner(self, **how: Any) -> TorchRunner:
        return TorchRunner(self.spec, self.program, self.weights, **how)

    def on_card(self) -> TorchRunner:
        shape = shape_of(self.program, torch.bfloat16)
        assert shape is not None
        ops = CardOps(FlashInferDecode(fake_flashinfer, shape, "cpu"), FlashInferDraw(fake_flashinfer.sampling))
        return self.runner(ops=ops, card="cpu")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("gemma"), "gemma2", sliding_window=24)


def test_decodes_by_tables_of_pages_read_what_jobs_do(gemma: Model) -> None:
    plain, card = (Driver(runner, pages=24, chunk=16) for runner in (gemma.runner(), gemma.on_card()))
    for driver in (plain, card):
        driver.answer(PROMPTS, Sampling(temperature=0.0, max_tokens=12, logprobs=1, logit_bias={7: 100.0}))
    for key in range(len(PROMPTS)):  # a bias chooses the tokens, so that both read the same ones
        ours, torchs = ([one.chosen.logprob for one in driver.logprobs[key]] for driver in (card, plain))
        assert ours == pytest.approx(torchs, abs=0.15)


def test_what_others_wrote_to_the_hosts_pages_is_read_and_what_a_step_wrote_is_there(gemma: Model) -> None:
    first = Driver(gemma.runner(), pages=24, chunk=16)
    card, prompt = gemma.runner(card="cpu"), PROMPTS[1]
    elsewhere = StepPlan((SequenceStep(1, prompt[:40], 0, [3, 1, 5, 2]),))
    behind = StepPlan((SequenceStep(1, prompt[40:], 40, [3, 1, 5, 2], targets=[1] * 10, pool=True),))
    first.runner.run(elsewhere)
    wanted = first.runner.run(behind)
    for count in (1, 2):  # the second time the host's pages are others'
        buffer = bytearray(24 * gemma.spec.layout.page_bytes)
        card.bind(memoryview(buffer), 24)
        card.run(StepPlan((SequenceStep(7, [count] * 40, 0, [3, 1, 5, 2]),)))
        other = gemma.runner()
        other.bind(memoryview(buffer), 24)
        other.run(elsewhere)
        assert card.run(behind).scored == wanted.scored
    assert bytes(buffer) == bytes(_pages_of(gemma, elsewhere, behind))


def _pages_of(model: Model, *plans: StepPlan) -> bytearray:
    buffer, runner = bytearray(24 * model.spec.layout.page_bytes), model.runner()
    runner.bind(memoryview(buffer), 24)
    for plan in plans:
        runner.run(plan)
    return buffer


def test_pages_are_copied_in_runs_and_only_where_they_are_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_pages, "COPY_BYTES", 2 * 8)  # two pages a copy
    host = torch.arange(6 * 8, dtype=torch.uint8).view(6, 8)
    mirror, table = CardPages(host, "cpu"), [4, 0, 5, 1]
    items = (SequenceStep(1, [1], 50, table),)
    assert mirror.bring(items) == [0, 1, 4, 5]
    assert all(mirror.memory[page].equal(host[page]) for page in table)
    mirror.memory[1] = 77
    mirror.write_back(items, [0, 1, 4, 5])
    assert host[1].tolist() == [77] * 8
    assert mirror.bring((SequenceStep(1, [1], 51, table),)) == []
    mirror.failed()
    assert mirror.bring((SequenceStep(1, [1], 51, table),)) == [0, 1, 4, 5]


def test_a_step_that_fails_leaves_no_page_current(gemma: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    card, table = gemma.on_card(), [0, 1, 2]
    card.bind(memoryview(bytearray(4 * gemma.spec.layout.page_bytes)), 4)
    card.run(StepPlan((SequenceStep(1, [4] * 20, 0, table),)))
    decode = StepPlan((SequenceStep(1, [4], 20, table, targets=[3]),))
    wanted = card.run(decode).scored
    with monkeypatch.context() as broken:
        broken.setattr(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, "run", _broken)
        with pytest.raises(BatonError, match="launch failed"):
            card.run(decode)
    assert card._mirror is not None
    assert card._mirror.bring(decode.items) == [0, 1]
    assert card.run(decode).scored == wanted


def test_a_copy_to_the_card_that_fails_half_way_leaves_no_page_current(
    gemma: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, table = gemma.on_card(), [0, 1, 2]
    card.bind(memoryview(bytearray(6 * gemma.spec.layout.page_bytes)), 6)
    card.run(StepPlan((SequenceStep(1, [4] * 20, 0, table),)))
    assert card._mirror is not None
    with monkeypatch.context() as broken:
        broken.setattr(torch.Tensor, "index_copy_", _broken)
        with pytest.raises(BatonError, match="launch failed"):
            card.run(StepPlan((SequenceStep(2, [4], 20, [3, 4]),)))
    assert card._mirror.bring((SequenceStep(1, [4], 20, table),)) == [0, 1]


def test_a_request_whose_token_cannot_be_chosen_leaves_pages_current_and_on_the_host(gemma: Model) -> None:
    card, table = gemma.on_card(), [0, 1, 2]
    buffer, size = bytearray(4 * gemma.spec.layout.page_bytes), 2 * gemma.spec.layout.page_bytes
    card.bind(memoryview(buffer), 4)
    greedy = Sampling(temperature=0.0, max_tokens=2)
    nothing = SampleSpec(greedy, 0, 20, [4] * 20, 20, (), lambda size: np.zeros(size, bool))
    with pytest.raises(BatonError):
        card.run(StepPlan((SequenceStep(1, [4] * 20, 0, table, sample=nothing),)))
    assert card._mirror is not None
    assert card._mirror.bring((SequenceStep(1, [4], 20, table),)) == []
    assert bytes(buffer[:size]) == bytes(card._mirror.memory[:2].flatten().numpy())
    assert any(buffer[:size])


def test_decodes_on_a_card_are_gathered_in_few_pieces(gemma: Model) -> None:
    def jobs(pages: str) -> int:
        builder = BatchBuilder(gemma.program, torch.bfloat16, "cpu", pages=pages)
        items = [SequenceStep(at, [1], 4095, range(256)) for at in range(64)]
        return len(builder.build(StepPlan(tuple(items))).jobs[0])

    assert (jobs("cpu"), jobs("meta")) == (32, 1)


def _broken(*_: object, **__: object) -> None:
    raise BatonError("launch failed")


def test_a_card_without_room_for_the_mirror_ends_the_start_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("8 bytes are free")

    monkeypatch.setattr(torch, "zeros", full)
    host = torch.empty((2, 8), dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"no 0\.00 GiB for KV pages: 8 bytes.*lower worker\.kv_memory_bytes"):
        CardPages(host, "cpu")


def test_draws_are_those_of_torch_by_the_same_numbers() -> None:
    draw, rows = FlashInferDraw(fake_flashinfer.sampling), 64
    logits, number = 3 * torch.randn(rows, 50), torch.rand(rows, dtype=torch.float64)
    top_k = torch.randint(0, 60, (rows,))
    top_p, min_p = torch.where(torch.rand(rows) < 0.5, 1.0, torch.rand(rows)), torch.rand(rows) * 0.05
    asked = (logits, torch.rand(rows) + 0.3, top_k, top_p, min_p, number)
    assert (draw(*asked) == sample(*asked)).float().mean() > 0.98  # sums differ in their last bits
    plain = (logits, torch.ones(rows), 0 * top_k, torch.ones(rows), 0 * min_p, number)
    assert draw(*plain).equal(sample(*plain))


def test_what_is_right_and_faster_is_taken_and_kept_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ops_on(L4, SHAPE, "cpu", TINY)
    assert isinstance(found.attention, FlashInferDecode)
    assert isinstance(found.draw, FlashInferDraw)
    record = choices_on(L4, SHAPE, "cpu", TINY)
    assert [(choice.op, choice.way, len(choice.trials)) for choice in record.choices] == [
        (ATTENTION, "flashinfer", 4),
        (DRAW, "flashinfer", 1),
    ]
    assert record.choices[1].told == "filters of a draw: flashinfer (flashinfer 2 us, torch 9 us)"
    monkeypatch.setattr(card_ops, "try_library", pytest.fail)  # the record serves
    assert isinstance(ops_on(L4, SHAPE, "cpu", TINY).attention, FlashInferDecode)
    assert card_ops.earlier_choices(L4) == record
    card_ops.forget_choices(L4)
    assert card_ops.earlier_choices(L4) is None


@pytest.mark.parametrize("changed", ["driver", "shape", "version", "sources", "compiler"])
def test_a_record_of_another_environment_is_not_used(monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    ops_on(L4, SHAPE, "cpu", TINY)
    tried: list[AttentionShape] = []
    monkeypatch.setattr(card_ops, "try_library", lambda shape, *_: tried.append(shape) or ())
    gpu = Gpu("NVIDIA L4", (8, 9), (13, 1), 24 << 30) if changed == "driver" else L4
    if changed == "version":
        monkeypatch.setattr(card_ops, "_version", lambda package: "9.9")
    if changed == "compiler":
        monkeypatch.setattr(card_ops, "_has_nvcc", lambda: not _HAS_NVCC())
    if changed == "sources":
        monkeypatch.setattr(Path, "read_bytes", _other_sources(Path.read_bytes))
    shape = AttentionShape(8, 2, 16, "bfloat16", 0.25, ((0, 0.0),)) if changed == "shape" else SHAPE
    choices_on(gpu, shape, "cpu", TINY)
    assert tried == [shape]


def _other_sources(read: Callable[[Path], bytes]) -> Callable[[Path], bytes]:
    return lambda path: read(path) + (b"#" if path.suffix == ".py" else b"")


def test_what_is_slower_wrong_or_fails_is_not_taken_and_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, [SLOW, FAST])
    assert ways() == [(card_ops.TORCH, card_ops.FASTER)] * 2
    wrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper
    with monkeypatch.context() as changed:
        changed.setattr(wrapper, "run", lambda self, q, cache: torch.full_like(q, torch.nan))
        (way, why), _ = ways()
        assert way == card_ops.TORCH
        assert why.startswith("flashinfer's results are wrong on this card: 2 decodes of 37 tokens, ")
    with monkeypatch.context() as changed:
        changed.setattr(wrapper, "plan", _broken)
        assert ways()[0] == (card_ops.TORCH, "flashinfer failed: BatonError: launch failed")


@pytest.mark.parametrize("broken", ["import", "gone", "plan", "result", "draw"])
def test_what_a_record_takes_and_does_not_run_today_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    ops_on(L4, SHAPE, "cpu", TINY)
    record, wrapper = card_ops.earlier_choices(L4), fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper
    if broken == "import":
        monkeypatch.setattr(card_ops, "imported", _broken)
    elif broken == "gone":
        monkeypatch.setitem(sys.modules, "flashinfer", None)
    elif broken == "plan":
        monkeypatch.setattr(wrapper, "plan", _broken)
    elif broken == "result":
        monkeypatch.setattr(wrapper, "run", lambda self, q, cache: torch.full_like(q, torch.nan))
    else:
        monkeypatch.setattr(fake_flashinfer.sampling, "top_p_renorm_probs", _broken)
    assert ops_on(L4, SHAPE, "cpu", TINY) == CardOps()
    assert "torch computes what was chosen for flashinfer: " in caplog.text
    assert card_ops.earlier_choices(L4) == record  # a start with all that it needs takes it again


def test_a_kernel_that_faults_is_noted_and_the_next_start_takes_torchs_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as faulty:
        faulty.setattr(card_ops, "_free", _broken)
        with pytest.raises(ConfigError, match=r"unusable for this process: .*launch failed; it is noted") as told:
            ops_on(L4, SHAPE, "cpu", TINY)
    assert told.value.param == "device"
    assert ops_on(L4, SHAPE, "cpu", TINY) == CardOps()
    record = card_ops.earlier_choices(L4)
    assert record is not None
    assert {choice.why for choice in record.choices} == {"flashinfer failed: BatonError: launch failed"}


def test_want_of_memory_is_of_one_start_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as crowded:
        crowded.setattr(card_ops, "paged_attention", full)  # the reference
        ops = ops_on(L4, SHAPE, "cpu", TINY)
        assert (ops.attention, ops.draw is None) == (None, False)
        assert ways()[0] == (card_ops.TORCH, "there was too little memory to try flashinfer: CUDA out of memory")
    assert card_ops.earlier_choices(L4) is None
    assert ops_on(L4, SHAPE, "cpu", TINY).attention is not None


def test_the_compiler_is_looked_for_where_the_library_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(card_ops, "NVCC", str(tmp_path / "nvcc"))
    assert not card_ops._has_nvcc()
    monkeypatch.setattr(card_ops, "NVCC", str(tmp_path / "bin" / "nvcc"))
    assert card_ops._has_nvcc()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    assert not card_ops._has_nvcc()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert card_ops._has_nvcc()


def ways() -> list[tuple[str, str]]:
    return [(choice.way, choice.why) for choice in card_ops.try_library(SHAPE, "cpu", TINY)]


def test_without_the_library_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as import does for what isn't there
    assert [why for _, why in ways()] == [card_ops.WITHOUT] * 2
    assert ops_on(L4, SHAPE, "cpu", TINY) == CardOps(None, None)


def test_a_folder_that_cannot_be_written_costs_a_trial_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "file"))
    monkeypatch.setattr(card_ops, "try_library", lambda *_: (OpChoice(ATTENTION, "torch", "it is faster"),))
    assert choices_on(L4, SHAPE, "cpu", TINY).choices[0].told == "decode attention: torch, because it is faster"
    assert "the next start tries again" in caplog.text


def test_forms_that_the_library_has_not_are_left_to_torch(tmp_path: Path) -> None:
    sinks = program_for(ModelConfig.read(make(tmp_path / "sinks", "gpt_oss")))
    assert shape_of(sinks, torch.bfloat16) is None
    program = program_for(ModelConfig.read(make(tmp_path / "plain", "llama2", **SMALL)))
    assert shape_of(program, torch.float32) is None
    found = shape_of(program, torch.bfloat16)
    assert found is not None
    assert found.forms == ((0, 0.0),)
