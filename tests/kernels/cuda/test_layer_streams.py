"""A prompt's rows go back to the host's pages layer by layer, on a stream beside the step's."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary
from baton.protos.errors import BatonError
from baton.protos.nouns import LayerGroup
from tests.kernels.cuda import steps

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

PAGES, ROWS = 24, 270  # more rows than a graph is captured for


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return steps.simt()


def two_layers() -> Program:
    """The trial's layer twice, by the same weights."""
    one = trials.one_layer(steps.model())
    embed, *layer, head = one.ops
    again: list[Any] = []
    for op in layer:
        if isinstance(op, p.RopeAppend | p.PagedAttention):
            again.append(msgspec.structs.replace(op, layer=1))
        elif isinstance(op, p.RmsNorm) and op.delta is None:
            again.append(msgspec.structs.replace(op, delta="delta"))
        else:
            again.append(op)
    group = LayerGroup("full", ("k", "v"), 2, one.kv_heads, one.head_dim)
    return msgspec.structs.replace(one, ops=(embed, *layer, *again, head), groups=(group,))


def runners(on: CudaLibrary) -> tuple[NativeRunner, CudaRunner]:
    program = two_layers()
    spec, weights = trials.spec_of(program, "bfloat16"), trials.random_weights(program, torch.bfloat16, 3)
    both = NativeRunner(spec, program, weights), CudaRunner(spec, program, weights, on)
    for runner in both:
        runner.bind(memoryview(bytearray(PAGES * spec.layout.page_bytes)), PAGES)
    return both


def plan(rows: int = ROWS) -> StepPlan:
    rng = np.random.default_rng(6)
    table = rng.permutation(PAGES).tolist()
    return StepPlan((SequenceStep(0, rng.integers(0, 300, rows).tolist(), 0, table, pool=True),))


def pages_apart(cpu: NativeRunner, gpu: CudaRunner) -> float:
    """Returns how far the host's pages are from the CPU's, in the worst page and layer."""
    want, have = (r._memory.view(torch.bfloat16).view(PAGES * 2, -1).double() for r in (cpu, gpu))
    return float(((have - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-3)).max())


def test_each_layers_rows_are_in_the_hosts_pages_when_the_step_is_done(device: CudaLibrary) -> None:
    cpu, gpu = runners(device)
    want, have = cpu.run(plan()), gpu.run(plan())
    assert pages_apart(cpu, gpu) < 2e-2
    apart = np.linalg.norm(have.pooled[0].last - want.pooled[0].last) / np.linalg.norm(want.pooled[0].last)
    assert apart < 2 * trials.STATES
    gpu.close()


@pytest.mark.thorough
@pytest.mark.parametrize("bug", ["FORK", "JOIN"])
def test_a_stream_that_does_not_wait_is_noticed(bug: str) -> None:
    """One planted bug sends rows back before they are there; the other ends the step before they have arrived."""
    cpu, gpu = runners(steps.simt((f"-DBATON_MUTATION_CUDA_STEP_{bug}",)))
    cpu.run(plan())
    if bug == "FORK":
        with pytest.raises(BatonError, match="failed on the GPU"):
            gpu.run(plan())
    else:
        gpu.run(plan())
        assert pages_apart(cpu, gpu) > 0.5
    gpu.close()
