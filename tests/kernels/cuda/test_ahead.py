"""Steps that are submitted while the one before them runs: rows take its tokens in the device's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.backends.cuda import ahead_trial
from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.ahead_trial import ahead_off
from baton.engine.backends.cuda.runner import AT_ONCE, BY_GRAPH, PLAIN, CudaRunner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.protos.errors import BatonError
from baton.protos.nouns import Sampling
from tests.kernels.cuda.steps import Kind, model, simt
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return simt()


@pytest.fixture
def made(device: CudaLibrary) -> Iterator[Any]:
    found: list[CudaRunner] = []

    def of(kind: Kind = torch.bfloat16, how: int = BY_GRAPH, on: CudaLibrary = device) -> CudaRunner:
        program = trials.one_layer(model())
        spec, weights = trials.spec_of(program, "int8"), trials.random_weights(program, kind, 3)
        found.append(CudaRunner(spec, program, weights, on, how=how))
        return found[-1]

    yield of
    for runner in found:
        runner.close()


@pytest.mark.parametrize(
    ("how", "demand"), first_now([(BY_GRAPH, False), (BY_GRAPH, True), (AT_ONCE, False), (PLAIN, False)])
)
def test_tokens_are_those_of_steps_one_after_another(made: Any, how: int, demand: bool) -> None:
    runner = made(how=how)
    if demand:
        runner.on_demand(0)
    assert ahead_off(runner) == ""
    assert runner.counts()["replayed"] >= (2 * ahead_trial.STEPS - 2) * (how != PLAIN)


@pytest.mark.thorough
def test_a_row_that_takes_its_neighbours_token_is_noticed(made: Any) -> None:
    assert "chose other tokens" in ahead_off(made(on=simt(("-DBATON_MUTATION_CUDA_STEP_FEED",))))


def decode(seq: int, token: int, at: int) -> SequenceStep:
    return SequenceStep(seq, [token], at, [seq], SampleSpec(GREEDY, 0, at + 1, (), 1))


def test_rows_that_are_fed_stand_beside_prompts_and_a_larger_step_moves_nothing_that_runs(made: Any) -> None:
    runner: CudaRunner = made()
    runner.bind(memoryview(bytearray(trials.PAGES * runner.spec.layout.page_bytes)), trials.PAGES)
    prompt = np.random.default_rng(4).integers(0, 300, 14).tolist()
    first = StepPlan((decode(0, 7, 0),))
    second = StepPlan(
        (
            SequenceStep(1, prompt, 0, [1], SampleSpec(GREEDY, 0, 14, (), 14), is_prefill=True, pool=True),
            decode(0, 0, 1),
            *(decode(seq, seq, 0) for seq in range(2, 9)),
        )
    )
    [one] = runner.run(first).sampled
    fed = msgspec.structs.replace(second.items[1], tokens=[one.token_id])
    want = runner.run(StepPlan((second.items[0], fed, *second.items[2:])))
    steps = runner.async_steps
    assert steps is not None
    steps.submit(first)
    steps.submit(second, {0})
    assert [found.token_id for found in steps.collect().sampled] == [one.token_id]
    have = steps.collect()
    assert have.sampled == want.sampled
    assert have.pooled[1].last.tobytes() == want.pooled[1].last.tobytes()
    assert have.seconds > 0


def test_a_step_that_cannot_be_submitted_leaves_the_one_before_it_alone(made: Any) -> None:
    runner: CudaRunner = made()
    runner.bind(memoryview(bytearray(trials.PAGES * runner.spec.layout.page_bytes)), trials.PAGES)
    plan = StepPlan((decode(0, 7, 0),))
    want, steps = runner.run(plan).sampled, runner.async_steps
    assert steps is not None
    steps.submit(plan)
    with pytest.raises(BatonError, match="names a page outside"):
        steps.submit(StepPlan((msgspec.structs.replace(decode(0, 0, 1), pages=[99]),)), {0})
    assert steps.collect().sampled == want
    assert runner.run(plan).sampled == want


def test_a_launch_that_fails_ahead_is_an_error_of_that_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: CudaRunner = made()
    runner.bind(memoryview(bytearray(trials.PAGES * runner.spec.layout.page_bytes)), trials.PAGES)
    plan, behind = StepPlan((decode(0, 7, 0),)), StepPlan((decode(0, 0, 1),))
    want, steps, call = runner.run(plan).sampled, runner.async_steps, runner._device.call
    assert steps is not None
    steps.submit(plan)

    def refuse(name: str, *arguments: object) -> None:
        if name == "session_run":
            raise DeviceError("session_run: no such kernel (status 98)")
        call(name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(runner._device, "call", refuse)
        with pytest.raises(BatonError, match="the step failed on the GPU"):
            steps.submit(behind, {0})
    assert steps.collect().sampled == want
    steps.submit(plan)
    steps.submit(behind, {0})
    assert steps.collect().sampled == want
    assert len(steps.collect().sampled) == 1
