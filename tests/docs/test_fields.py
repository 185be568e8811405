"""docs/fields.md is what its script writes."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current() -> None:
    """`make reference` writes it."""
    spec = importlib.util.spec_from_file_location("fields", DOCS / "fields.py")
    fields = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fields)
    assert fields.FILE.read_text() == fields.page()
