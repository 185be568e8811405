"""Runs the suite of trees of drafts on CUDA runners of a small Llama, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from baton.engine.abilities import branches_of
from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import CudaRunner
from baton.kernels.cuda import shim
from baton.kernels.cuda.library import CudaLibrary
from baton.protos.errors import BatonError
from tests.kernels import branch_suite
from tests.kernels.cuda.steps import Kind
from tests.kernels.megakernel_case import Shape, llama

ONE_LAYER = Shape(layers=1)


def runner(device: CudaLibrary, how: int, kind: Kind, kv: str, shape: Shape = Shape()) -> CudaRunner:
    program = llama(shape)
    made = CudaRunner(
        trials.spec_of(program, kv), program, trials.random_weights(program, kind, 3), device, how=how
    )
    made.bind(memoryview(bytearray(branch_suite.PAGES * made.spec.layout.page_bytes)), branch_suite.PAGES)
    return made


def check(made: CudaRunner, starts: tuple[int, ...] = tuple(branch_suite.TREES)) -> dict[str, int]:
    """Runs the suite; returns the runner's counts of steps by kind."""
    try:
        assert branches_of(made)

        def read() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
            found: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = made._memory.numpy()
            return found.reshape(branch_suite.PAGES, -1)

        branch_suite.every_row_is_its_own_path(made, read, starts)
        return made.counts()
    finally:
        made.close()


def caught(broken: CudaLibrary, how: int, kv: str, seed: int) -> bool:
    """Returns whether the suite fails on a library with a planted bug, whose schedules are drawn with ``seed``."""
    shim.Simt(Path(broken.path)).schedule(seed, preempt=200)
    try:
        check(runner(broken, how, (4, 32), kv, ONE_LAYER), (14, 29))
    except (AssertionError, BatonError):
        return True
    return False
