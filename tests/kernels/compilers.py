"""Builds the CUDA kernels for tests, for the shim or a GPU; tests are skipped where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.kernels.abi.compiler import BuildError, compiler
from baton.kernels.cuda import build, on_gpu


@contextmanager
def needs_compiler() -> Iterator[None]:
    """Around what builds, or on a function that does. What a compiler refuses is a failure."""
    try:
        if not on_gpu.asked():
            compiler()
        elif build.prebuilt() is None:
            build.nvcc()
    except BuildError as error:
        pytest.skip(f"the kernels can't be built here: {error}")
    yield
