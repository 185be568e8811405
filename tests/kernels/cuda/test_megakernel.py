"""The megakernel on the SIMT shim, all blocks of its grid resident: to the bit what the step op by op computes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.load import on_kernels
from baton.engine.backends.cuda.runner import AT_ONCE, BY_GRAPH, CudaRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import StepPlan
from baton.engine.program.program import Program
from baton.kernels.abi import native
from baton.kernels.cuda import build, shim
from baton.kernels.cuda.library import CudaLibrary
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from tests.kernels.compilers import needs_compiler
from tests.kernels.cuda.steps import DRAWN, STEP_OPS, steps
from tests.kernels.megakernel_case import Batch, Case, Kind, Shape, agrees, llama
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

INT4: Kind = (4, 32)
INT8: Kind = (8, 0)
RAGGED = Batch([(5, 1), (260, 1), (0, 1)])
SMALL = Shape(layers=2)
# Forms: each kind of weights, each kind of KV.
FORMS: list[tuple[Kind, str]] = [
    (torch.bfloat16, "bfloat16"),
    (INT4, "int8"),
    (INT8, "fp8_e4m3"),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "fp8_e4m3"),
    (INT8, "bfloat16"),
    (INT8, "int8"),
    (INT4, "bfloat16"),
    (INT4, "fp8_e4m3"),
]
# Heads that share tiles, that straddle them, that have several; windows, QK-norm, biases; wide rows.
SHAPES: list[tuple[Shape, Kind, str, Batch, int]] = [
    (
        Shape(head_dim=24, heads=6, hidden=72, inner=48, biases=True),
        torch.bfloat16,
        "bfloat16",
        Batch([(31, 1), (9, 2)]),
        2,
    ),
    (
        Shape(head_dim=128, heads=2, kv_heads=1, hidden=160, norms=True),
        INT8,
        "fp8_e4m3",
        Batch([(5, 1), (17, 2)], 1),
        3,
    ),
    (
        Shape(head_dim=8, heads=6, hidden=72, inner=48, window=20, layers=3),
        INT8,
        "bfloat16",
        Batch([(31, 1)] * 8),
        5,
    ),
    (Shape(head_dim=64, heads=8, hidden=512, inner=640, layers=1), (4, 128), "fp8_e4m3", Batch([(31, 8)]), 3),
    (
        Shape(head_dim=16, heads=16, kv_heads=1, layers=1, hidden=640, inner=1024),
        INT4,
        "int8",
        Batch([(40, 1), (1, 1)]),
        4,
    ),
    (Shape(), INT4, "int8", Batch([(511, 3), (255, 2)], 3), 1),
]


@needs_compiler()
def library(*flags: str, seed: int = 3, preempt: int = 0, races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(["megakernel"], flags, races=races), seed=seed, preempt=preempt)


@pytest.fixture(scope="module")
@needs_compiler()
def ops() -> ctypes.CDLL:
    """Returns a library with the op-by-op step."""
    return shim.as_library(build.simt(STEP_OPS))


@pytest.fixture(scope="module")
def device(ops: ctypes.CDLL) -> CudaLibrary:
    return CudaLibrary(Path(ops.path))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "kv"), first_now(FORMS, 2), ids=str)
def test_a_step_at_once_has_the_bits_of_the_ops(ops: ctypes.CDLL, kind: Kind, kv: str) -> None:
    agrees(Case(SMALL, kind, kv), ops, library(), RAGGED)


@pytest.mark.parametrize(("shape", "kind", "kv", "batch", "blocks"), first_now(SHAPES), ids=lambda v: str(v)[:60])
def test_so_does_every_shape_of_a_llama(
    ops: ctypes.CDLL, shape: Shape, kind: Kind, kv: str, batch: Batch, blocks: int
) -> None:
    agrees(Case(shape, kind, kv), ops, library(), batch, blocks=blocks)


def test_counts_go_on_from_step_to_step_whatever_rows_and_grid_the_next_one_has(ops: ctypes.CDLL) -> None:
    case, mine = Case(SMALL, INT4, "int8"), library()
    for rows, blocks in ((1, 3), (5, 3), (1, 1), (8, 4), (2, 2), (1, 3)):
        agrees(case, ops, mine, Batch([(7, 1)] * rows), steps=1, blocks=blocks)


@pytest.mark.parametrize("seed", first_now(range(12), 2))
def test_no_schedule_changes_a_bit(ops: ctypes.CDLL, seed: int) -> None:
    agrees(Case(SMALL, INT4, "int8"), ops, library(seed=seed, preempt=150), Batch([(19, 1), (270, 2)]), steps=2)


@pytest.mark.parametrize("seed", first_now(range(3)))
def test_no_access_of_shared_memory_races(ops: ctypes.CDLL, seed: int) -> None:
    raced = library("-DBATON_MUTATION_CUDA_MEGA_SMALL", seed=seed, preempt=10, races=True)
    agrees(Case(Shape(layers=1), INT4, "int8"), ops, raced, Batch([(19, 1), (3, 1)]), steps=1, blocks=2)


BUGS = ["BARRIER", "PREFETCH", "TARGET", "PHASE", "RESET", "HEAD", "NORM", "RESULTS"]


@pytest.mark.parametrize("bug", first_now(BUGS, 2))
def test_planted_bugs_are_caught(ops: ctypes.CDLL, bug: str) -> None:
    flags = ("-DBATON_MUTATION_CUDA_MEGA_SMALL", f"-DBATON_MUTATION_CUDA_MEGA_{bug}")
    races = bug in ("NORM", "RESULTS")

    def check(found: ctypes.CDLL) -> None:
        agrees(Case(SMALL, INT4, "int8"), ops, found, Batch([(19, 1), (3, 1)]), steps=2)

    assert any(is_caught(library(*flags, seed=seed, preempt=100, races=races), [check]) for seed in range(4))


def runner(device: CudaLibrary, kind: Kind, kv: str, how: int, shape: Shape = SMALL) -> CudaRunner:
    program = llama(shape)
    made = CudaRunner(
        trials.spec_of(program, kv), program, trials.random_weights(program, kind, 3), device, how=how
    )
    made.bind(memoryview(bytearray(trials.PAGES * made.spec.layout.page_bytes)), trials.PAGES)
    return made


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), DRAWN], ids=["greedy", "drawn"])
def test_a_session_draws_the_same_tokens_and_captures_the_step(device: CudaLibrary, sampling: Sampling) -> None:
    answers = []
    for how in (BY_GRAPH, AT_ONCE):
        gpu = runner(device, INT4, "int8", how)
        asked = steps(gpu.spec.vocab_size, [15, 3], sampling)
        found = [gpu.run(next(asked)) for _ in range(6)]
        answers.append([[(s.seq, s.token_id) for s in result.sampled] for result in found])
        answers[-1].append([result.pooled[0].last.tobytes() for result in found])
        counts = gpu.counts()
        assert (counts["captured"], counts["replayed"]) == (1, 4)
        assert counts["at_once"] == (5 if how == AT_ONCE else 0)  # the prompt's 18 rows went by launches
        gpu.close()
    assert answers[0] == answers[1]


def test_a_batch_of_more_rows_takes_the_graph(device: CudaLibrary) -> None:
    gpu = runner(device, torch.bfloat16, "bfloat16", AT_ONCE)
    asked = steps(gpu.spec.vocab_size, [1] * 9, Sampling(temperature=0.0))
    plan = next(asked)
    gpu.run(plan)
    assert gpu.counts()["at_once"] == 0
    gpu.run(StepPlan(next(asked).items[:8]))
    assert gpu.counts()["at_once"] == 1
    gpu.close()


def without(number: int, **changes: Any) -> Callable[[Program], Program]:
    def changed(program: Program) -> Program:
        ops = list(program.ops)
        ops[number] = msgspec.structs.replace(ops[number], **changes)
        return msgspec.structs.replace(program, ops=tuple(ops))

    return changed


def test_a_program_that_is_no_llama_is_refused_by_the_op(
    device: CudaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CUDA_SIMT", "1")

    def load(shape: Shape, kind: Kind, kv: str, change: Callable[[Program], Program] = lambda x: x) -> str:
        program = change(llama(shape))
        weights = trials.random_weights(program, kind, 3)
        with pytest.raises(ConfigError) as found:
            on_kernels(trials.spec_of(program, kv), program, weights, device, cuda_step="mega")
        assert found.value.param == "cuda_step"
        assert found.value.message.endswith("; use graph")
        return found.value.message

    assert "op 2 (Linear 0.qkv): its weights are not bf16, int8" in load(SMALL, torch.float32, "bfloat16")
    assert "op 2 (Linear 0.qkv): its weights are not bf16, int8" in load(SMALL, (8, 32), "bfloat16")
    assert "op 4 (PagedAttention layer 0): KV is not" in load(Shape(head_dim=256), INT8, "int8")
    other = without(10, delta=None)
    assert "op 10 (RmsNorm 1.n1): what it adds is not the layer in front's" in load(SMALL, INT8, "int8", other)


def test_an_unknown_way_to_run_a_step_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="CUDA step 'fast' is unknown; use auto, graph or mega"):
        load_runner(EngineConfig("no such model", cuda_step="fast"))  # type: ignore[arg-type]
