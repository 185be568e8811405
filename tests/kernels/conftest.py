"""The CPU's library, for every suite that takes one."""

from __future__ import annotations

import ctypes

import pytest

from baton.kernels.abi import native

needs_native = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        pytest.skip("no native kernels here")
    return found
