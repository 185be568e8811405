"""A module that was rewritten beforehand is taken as it is, and written anew once its source has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.rewriting import rewrite_module


def test_what_is_cached_is_what_pytest_would_load_and_follows_the_source(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    module = tmp_path / "test_one.py"
    module.write_text("def test_it() -> None:\n    assert [1] == [2]\n")
    cached = rewrite_module(pytestconfig, module)
    first = rewrite._read_pyc(module, cached)
    assert first is not None
    assert "@pytest_ar" in first.co_names
    module.write_text("def test_it() -> None:\n    assert [1] == [3]\n")
    assert rewrite._read_pyc(module, cached) is None
    assert rewrite_module(pytestconfig, module) == cached
    assert rewrite._read_pyc(module, cached) is not None
