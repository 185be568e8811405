"""A speculative verify on a CPU is as many decode steps, and their tokens."""

from __future__ import annotations

import pytest

from baton.kernels.abi import native
from tests.kernels import attention_suite, verify_suite


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("dtype", attention_suite.DTYPES)
def test_a_verified_run_is_the_decoded_one(dtype: str) -> None:
    library = native.library()
    assert library is not None
    verify_suite.a_verified_run_is_the_decoded_one(library, dtype)
