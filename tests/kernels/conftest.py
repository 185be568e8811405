"""The CPU's library, for every suite that takes one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from baton.kernels.abi import native

HERE = f"{Path(__file__).parent}/"
BUILD_S = (
    900  # seconds that a test may take: kernels are compiled within it, some files of them at once on two cores
)
needs_native = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        pytest.skip("no native kernels here")
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of this folder the time that compilers need where no kernel is in the cache yet."""
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.timeout(BUILD_S), append=False)
