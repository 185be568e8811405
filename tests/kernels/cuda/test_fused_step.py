"""Ops of a step that share a launch: as many launches as meant, and the bits of the ops one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import PLAIN, CudaRunner
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.plan import StepPlan
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.kernels.abi import native
from baton.kernels.cuda import on_gpu
from baton.kernels.cuda.library import CudaLibrary
from tests.kernels.cuda import steps
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

BF16, INT8, INT4 = torch.bfloat16, (8, 0), (4, 32)
# Of the trial's layer and head: launches of all ops one by one, and as a step runs.
LAUNCHES = {BF16: (20, 16), INT8: (20, 17), INT4: (20, 17)}


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return steps.simt()


def program_of(parallel: bool = False) -> Program:
    """Returns the trial's layer; with ``parallel``, what the first norm wrote is read again behind attention."""
    made = trials.one_layer(steps.model())
    if not parallel:
        return made
    norm = next(i for i, op in enumerate(made.ops) if isinstance(op, p.RmsNorm) and op.delta)
    ops = list(made.ops)
    ops[norm] = msgspec.structs.replace(ops[norm], out="other")
    return msgspec.structs.replace(made, ops=tuple(ops))


def runner_of(program: Program, kind: Any, on: CudaLibrary) -> CudaRunner:
    runner = CudaRunner(trials.spec_of(program, "bfloat16"), program, trials.random_weights(program, kind, 3), on)
    runner.bind(memoryview(bytearray(trials.PAGES * runner.spec.layout.page_bytes)), trials.PAGES)
    return runner


def launched(runner: CudaRunner) -> int:
    return int(runner._device.library.baton_simt_launches())


def results(runner: CudaRunner, plan: StepPlan, one_by_one: bool) -> tuple[list[Tensor], int]:
    """Returns what the head reads, and the number of launches."""
    with torch.inference_mode():
        batch = NativeBatch(plan, runner.spec.vocab_size, trials.PAGES)
        runner._reach(batch.reach)
        runner._call("session_angles", runner._session, runner._rope_angles.data_ptr(), runner._rope_angles.nbytes)
        runner._call("session_upload", runner._session, ctypes.byref(runner._step(batch)), PLAIN)
        before, count = launched(runner), len(runner._program.ops)
        for at in range(count) if one_by_one else [0]:
            to = at + 1 if one_by_one else count
            runner._call("session_run", runner._session, at, to, int(to == count))
        return [runner._rows(batch, name, slice(0, batch.rows)) for name in ("x", "delta")], launched(
            runner
        ) - before


def both(
    kind: Any, on: CudaLibrary, lengths: list[int], parallel: bool = False
) -> Iterator[tuple[list[Tensor], int]]:
    for one_by_one in (True, False):
        runner = runner_of(program_of(parallel), kind, on)
        yield results(runner, next(steps.steps(runner.spec.vocab_size, lengths, steps.DRAWN)), one_by_one)
        runner.close()


@pytest.mark.skipif(on_gpu.asked(), reason="a GPU counts no launches")
@pytest.mark.parametrize("kind", LAUNCHES, ids=str)
def test_a_step_has_fewer_launches_than_ops_one_by_one_and_the_same_bits(device: CudaLibrary, kind: Any) -> None:
    (alone, many), (together, few) = both(kind, device, [9, 4])
    assert (many, few) == LAUNCHES[kind]
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("kind", first_now([BF16, INT4], whole=True), ids=str)
def test_a_prompts_rows_have_the_same_bits_too(device: CudaLibrary, kind: Any) -> None:
    (alone, _), (together, _) = both(kind, device, [70])
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("kind", [BF16, INT8], ids=str)
def test_what_two_ops_read_stays_as_it_is(device: CudaLibrary, kind: Any) -> None:
    (alone, _), (together, _) = both(kind, device, [5], parallel=True)
    assert all(map(torch.equal, alone, together))


def test_float32_matrices_share_no_launch(device: CudaLibrary) -> None:
    (alone, many), (together, few) = both(torch.float32, device, [3])
    assert many == few
    assert all(map(torch.equal, alone, together))


@pytest.mark.thorough
def test_a_register_that_is_read_again_is_not_thrown_away() -> None:
    """The planted bug doesn't look whether another op reads what two ops share."""
    broken = steps.simt(("-DBATON_MUTATION_CUDA_STEP_READERS",))
    (alone, _), (together, _) = both(BF16, broken, [5], parallel=True)
    assert not torch.equal(alone[1], together[1])
