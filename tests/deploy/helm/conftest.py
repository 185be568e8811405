"""Skips the chart's tests where the Helm engine isn't installed."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def every_test_needs_it(helm_engine: None) -> None:
    """See ``helm_engine`` in tests/conftest.py."""
