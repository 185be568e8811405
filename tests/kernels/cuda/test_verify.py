"""A speculative verify by the CUDA kernels on the SIMT shim is as many decode steps, and their tokens."""

from __future__ import annotations

import pytest

from baton.kernels.cuda import build, shim
from tests.kernels import verify_suite

OPS = ("rope_append", "paged_attention", "lm_head", "speculative_accept")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_a_verified_run_is_the_decoded_one(dtype: str) -> None:
    verify_suite.a_verified_run_is_the_decoded_one(shim.as_library(build.simt(OPS), seed=3, preempt=50), dtype)
