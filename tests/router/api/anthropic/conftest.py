"""Imports Anthropic's client for the tests of this folder alone, because it takes a second and a half."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def anthropic_is_imported() -> None:
    """Imports the client before an event loop runs, which the import would hold up."""
    import anthropic  # noqa: F401
