"""Trees of drafts by the megakernel on the SIMT shim, which copies what branches begin with behind each head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.backends.cuda.runner import AT_ONCE
from baton.kernels.abi import native
from baton.kernels.cuda import shim
from baton.kernels.cuda.library import CudaLibrary
from tests.kernels.cuda.branching import ONE_LAYER, caught, check, runner
from tests.kernels.cuda.steps import Kind, simt
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

WAYS = [(AT_ONCE, (4, 32), "int8"), (AT_ONCE, torch.bfloat16, "bfloat16"), (AT_ONCE, (8, 0), "fp8_e4m3")]
SMALL = "-DBATON_MUTATION_CUDA_MEGA_SMALL"  # one form alone, which compiles sooner


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return simt()


@pytest.mark.parametrize(("how", "kind", "kv"), WAYS, ids=str)
def test_every_row_of_a_tree_has_the_bits_of_its_own_path(
    device: CudaLibrary, how: int, kind: Kind, kv: str
) -> None:
    counts = check(runner(device, how, kind, kv))
    assert counts["at_once"] > counts["plain"] > 0
    assert counts["replayed"] > 0


@pytest.mark.parametrize("seed", first_now(range(4)))
def test_no_schedule_changes_a_bit_of_a_tree(device: CudaLibrary, seed: int) -> None:
    schedule = shim.Simt(Path(device.path)).schedule
    schedule(seed, preempt=100)
    try:
        check(runner(device, AT_ONCE, (4, 32), "int8", ONE_LAYER), (14,))
    finally:
        schedule(1)


@pytest.mark.parametrize("bug", ["MEGA_BRANCH", "MEGA_BRANCH_PLANE", "BRANCH_SCALES"])
def test_planted_bugs_of_trees_are_caught(bug: str) -> None:
    broken = simt((SMALL, f"-DBATON_MUTATION_CUDA_{bug}"))
    assert any(caught(broken, AT_ONCE, "int8", seed) for seed in range(4))
