"""The real runner beyond parity: batches, dtypes, shapes, and what a step leaves in the pages."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from baton.engine.backends.torch.batch import _bucket
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner, SampledToken, SampleSpec, SequenceStep, StepPlan
from baton.kv.memory.host_pages import PageMemory
from baton.protos.errors import BatonError, InvalidRequest
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make, prompts
from tests.conformance.drive import Driver

GREEDY = Sampling(temperature=0.0, max_tokens=12, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    return load_runner(EngineConfig(str(model), threads=1))


def bound(runner: Runner, pages: int = 64) -> bytearray:
    buffer = bytearray(pages * runner.spec.layout.page_bytes)
    runner.bind(memoryview(buffer), pages)
    return buffer


def ask(history: list[int]) -> SampleSpec:
    return SampleSpec(GREEDY, 0, len(history), history, len(history))


def near(one: SampledToken, other: SampledToken) -> bool:
    assert one.logprobs is not None
    assert other.logprobs is not None
    return (
        one.token_id == other.token_id and abs(one.logprobs.chosen.logprob - other.logprobs.chosen.logprob) < 1e-5
    )


def test_a_mixed_step_answers_in_the_plans_order_and_each_as_alone(runner: Runner) -> None:
    bound(runner)
    asked = [prompt[:100] for prompt in prompts(1003, count=6)]
    pages = [list(range(i * 8, i * 8 + 8)) for i in range(6)]
    for prompt, table in zip(asked[:3], pages, strict=False):
        if len(prompt) > 1:
            runner.run(StepPlan((SequenceStep(0, prompt[:-1], 0, table),)))
    steps = [
        SequenceStep(key, prompt[start:], start, pages[key], ask(prompt) if key != 4 else None)
        for key, prompt in enumerate(asked)
        for start in [len(prompt) - 1 if key < 3 else 0]
    ]
    steps = [steps[5], steps[0], steps[4], steps[2], steps[3], steps[1]]
    together = runner.run(StepPlan(tuple(steps))).sampled
    assert [found.seq for found in together] == [5, 0, 2, 3, 1]
    for found in together:
        step = next(s for s in steps if s.seq == found.seq)
        assert near(runner.run(StepPlan((step,))).sampled[0], found)


def test_sixty_four_decodes_at_once_answer_as_alone(runner: Runner) -> None:
    asked = [prompt[: 3 + 2 * i] for i, prompt in enumerate(prompts(1003, 64, seed=4)) if len(prompt) > 2]
    together = Driver(runner, pages=700).answer(asked, GREEDY)
    single = Driver(runner, pages=20)
    for key in range(0, len(asked), 7):
        assert single.answer([asked[key]], GREEDY)[0] == together[key]


def test_a_step_writes_its_own_rows_and_nothing_else(runner: Runner) -> None:
    buffer = bound(runner)
    size = runner.spec.layout.page_bytes
    runner.run(StepPlan((SequenceStep(0, [5] * 17, 0, [9, 2]),)))
    written = {page for page in range(64) if any(buffer[page * size : (page + 1) * size])}
    assert written == {9, 2}
    before = bytes(buffer)
    runner.run(StepPlan((SequenceStep(0, [6], 17, [9, 2]),)))
    changed = [at for at in range(len(buffer)) if buffer[at] != before[at]]
    assert {at // size for at in changed} == {2}
    row = runner.spec.layout.groups[0].kv_heads * runner.spec.layout.groups[0].head_dim * 4
    assert {(at % size) // row % 16 for at in changed} == {1}


def test_it_computes_in_the_pages_that_the_other_process_sees(runner: Runner) -> None:
    size = runner.spec.layout.page_bytes
    with closing(PageMemory.create(6, size)) as memory:
        other = PageMemory.attach(os.dup(memory.fd), 6, size)
        runner.bind(memory.view(), 6)
        runner.run(StepPlan((SequenceStep(0, [5], 0, [4]),)))
        assert any(other.page(4))
        assert not any(other.page(3))
        other.close()
        bound(runner, 1)


def test_what_cannot_be_computed_is_refused_and_the_rest_goes_on(runner: Runner) -> None:
    bound(runner, 4)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        runner.run(StepPlan((SequenceStep(0, [1003], 0, [0]),)))
    with pytest.raises(BatonError, match="outside"):
        runner.run(StepPlan((SequenceStep(0, [1], 0, [4]),)))
    assert runner.run(StepPlan((SequenceStep(0, [1], 0, [3], ask([1])),))).sampled
    assert runner.run(StepPlan(())).sampled == ()


def test_bfloat16_is_close_to_float32(model: Path, runner: Runner) -> None:
    half = load_runner(EngineConfig(str(model), dtype="bfloat16", threads=1))
    assert half.spec.layout.page_bytes * 2 == runner.spec.layout.page_bytes
    assert (half.spec.layout.fidelity, half.spec.fingerprint) == ("bfloat16", runner.spec.fingerprint)
    prompt = prompts(1003)[3]
    plan = StepPlan((SequenceStep(0, prompt, 0, [1, 0], ask(prompt)),))
    likely = []
    for engine in (half, runner):
        bound(engine, 4)
        found = engine.run(plan).sampled[0].logprobs
        assert found is not None
        likely.append(found.chosen.logprob)
    assert likely[0] == pytest.approx(likely[1], abs=0.5)


def test_pages_of_nan_left_by_others_reach_nobody(runner: Runner) -> None:
    buffer = bound(runner, 8)
    prompt = prompts(1003)[4]
    plan = StepPlan((SequenceStep(0, prompt, 0, [1, 2], ask(prompt)),))
    clean = runner.run(plan).sampled[0]
    torch.frombuffer(buffer, dtype=torch.float32).fill_(torch.nan)
    assert near(runner.run(plan).sampled[0], clean)
    decode = SequenceStep(0, [3], len(prompt), [1, 2], ask([*prompt, 3]))
    assert runner.run(StepPlan((decode,))).sampled


def test_buckets_grow_by_half_an_octave_and_hold_what_they_are_asked() -> None:
    sizes = [_bucket(blocks) for blocks in range(1, 200)]
    assert sorted(set(sizes))[:8] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert all(size >= blocks and size <= 1.5 * blocks for blocks, size in enumerate(sizes, 1))
