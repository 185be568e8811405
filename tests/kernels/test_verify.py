"""A speculative verify on a CPU is as many decode steps, and their tokens."""

from __future__ import annotations

import ctypes

import pytest

from tests.kernels import attention_suite, verify_suite


@pytest.mark.parametrize("dtype", attention_suite.DTYPES)
def test_a_verified_run_is_the_decoded_one(library: ctypes.CDLL, dtype: str) -> None:
    verify_suite.a_verified_run_is_the_decoded_one(library, dtype)
