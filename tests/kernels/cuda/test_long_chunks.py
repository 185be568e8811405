"""Steps with long chunks of prompts: prompt attention has these, paged attention what is short beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import BY_GRAPH, CudaRunner
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import SequenceStep, StepPlan
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary
from tests.kernels.cuda.steps import model, simt

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

PAGES = 32


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return simt()


def ran(device: CudaLibrary, plan: StepPlan, head_dim: int = 32) -> tuple[float, set[str]]:
    """Returns how far a step's hidden states are from the CPU's at worst, and which ops attended."""
    program = trials.one_layer(model(head_dim=head_dim))
    spec, weights = trials.spec_of(program, "bfloat16"), trials.random_weights(program, torch.bfloat16, 3)
    runners: Any = NativeRunner(spec, program, weights), CudaRunner(spec, program, weights, device)
    results = []
    device.rehearsal.note()
    for runner in runners:
        runner.bind(memoryview(bytearray(PAGES * spec.layout.page_bytes)), PAGES)
        results.append(runner.run(plan))
    attended = {name.partition(" ")[0] for name in device.rehearsal.launched() if "attention" in name}
    runners[1].close()
    want, have = results
    off = [
        np.linalg.norm(have.pooled[seq].last - of.last) / np.linalg.norm(of.last) for seq, of in want.pooled.items()
    ]
    return float(max(off)) if np.isfinite(off).all() else float("inf"), attended


def plan_of(*counts: int) -> StepPlan:
    rng, items, first = np.random.default_rng(4), list[SequenceStep](), 0
    for seq, count in enumerate(counts):
        blocks = -(-count // 16)
        tokens, table = rng.integers(0, trials.VOCAB, count).tolist(), list(range(first, first + blocks))
        items.append(SequenceStep(seq, tokens, 0, table, pool=True))
        first += blocks
    return StepPlan(tuple(items))


def test_long_and_short_chunks_of_a_step_are_each_attended_to_once(device: CudaLibrary) -> None:
    off, attended = ran(device, plan_of(140, 63, 64, 1))
    assert off < trials.STATES
    assert attended == {"paged_attention", "prompt_attention"}


@pytest.mark.parametrize(
    ("counts", "head_dim"),
    [((140, 64), 32), ((63, 63, 63, 63, 20), 32), ((258,), 8)],
    ids=["a step that is captured", "short chunks alone", "heads that it has no form for"],
)
def test_other_steps_are_paged_attentions_alone(
    device: CudaLibrary, counts: tuple[int, ...], head_dim: int
) -> None:
    off, attended = ran(device, plan_of(*counts), head_dim)
    assert off < trials.STATES
    assert attended == {"paged_attention"}


def test_the_trial_of_a_card_has_a_long_chunk(device: CudaLibrary) -> None:
    assert sum(len(item.tokens) for item in trials.long_chunk(trials.VOCAB, 1).items) > 256
    found: list[CudaRunner] = []

    def on_shim(*which: Any) -> CudaRunner:
        found.append(CudaRunner(*which, device))
        return found[-1]

    weights: Any = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    device.rehearsal.note()
    assert trials.trial(model(), weights, "bfloat16", NativeRunner, on_shim, long=True) == ""
    assert "prompt_attention prompt<1, 64>" in device.rehearsal.launched()
    found[0].close()


def test_a_chunk_that_nobody_attends_to_is_noticed() -> None:
    off, _ = ran(simt(("-DBATON_MUTATION_CUDA_STEP_LONG",)), plan_of(140, 63, 64, 1))
    assert not off < trials.STATES


def test_a_captured_chunk_has_products_in_parts_and_the_bits_of_its_launches(device: CudaLibrary) -> None:
    """Memory for parts is there before a capture begins. A tile's slices of K are as many as the processors."""
    program = trials.one_layer(model())
    spec, weights = trials.spec_of(program, "bfloat16"), trials.random_weights(program, torch.bfloat16, 3)
    runners: Any = NativeRunner(spec, program, weights), CudaRunner(spec, program, weights, device)
    (cpu, gpu), plan = runners, plan_of(100)
    gpu.how = BY_GRAPH
    for runner in runners:
        runner.bind(memoryview(bytearray(PAGES * spec.layout.page_bytes)), PAGES)
    with device.rehearsal.dispatching(8) as seen:
        found = [gpu.run(plan).pooled[0].last for _ in range(3)]
    counts = gpu.counts()
    gpu.close()
    assert "linear add_parts<8>" in seen.launched()
    assert (counts["captured"], counts["replayed"]) == (1, 2)
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    want = cpu.run(plan).pooled[0].last
    assert np.linalg.norm(found[0] - want) / np.linalg.norm(want) < trials.STATES
