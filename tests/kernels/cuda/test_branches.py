"""Trees of drafts by the CUDA step on the SIMT shim, by launches and by graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from baton.engine.backends.cuda.runner import BY_GRAPH, PLAIN
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary
from tests.kernels.cuda.branching import ONE_LAYER, caught, check, runner
from tests.kernels.cuda.steps import Kind, simt

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

WAYS = [(BY_GRAPH, (8, 0), "fp8_e4m3"), (PLAIN, torch.bfloat16, "bfloat16"), (BY_GRAPH, (4, 32), "int8")]
# Bugs, and a way to run and KV that show each.
BUGS = [
    ("STEP_BRANCH_ORDER", PLAIN, "bfloat16"),
    ("STEP_BRANCH_SLOTS", BY_GRAPH, "int8"),
    ("STEP_BRANCH_KEPT", BY_GRAPH, "int8"),
    ("BRANCH_SCALES", BY_GRAPH, "int8"),
]


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return simt()


@pytest.mark.parametrize(("how", "kind", "kv"), WAYS, ids=str)
def test_every_row_of_a_tree_has_the_bits_of_its_own_path(
    device: CudaLibrary, how: int, kind: Kind, kv: str
) -> None:
    counts = check(runner(device, how, kind, kv))
    assert (counts["replayed"] > 0) == (how != PLAIN)


def test_a_captured_tree_reads_its_pages_anew(device: CudaLibrary) -> None:
    made = runner(device, BY_GRAPH, torch.bfloat16, "bfloat16", ONE_LAYER)
    before = made.counts()["replayed"]
    trees = []
    run = made._run

    def counted(rows: int) -> None:
        run(rows)
        trees.append((rows, made.counts()["replayed"]))

    made._run = counted  # type: ignore[method-assign]
    check(made, (14, 14, 14))
    found = [after - ahead for (_, ahead), (rows, after) in pairwise([(0, before), *trees]) if rows == 8]
    assert found == [0, 1, 1]  # by launches, captured and run, replayed


@pytest.mark.parametrize(("bug", "how", "kv"), BUGS)
def test_planted_bugs_of_trees_are_caught(bug: str, how: int, kv: str) -> None:
    assert caught(simt((f"-DBATON_MUTATION_CUDA_{bug}",)), how, kv, seed=1)
