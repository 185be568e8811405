"""docs/configuration.md is what its script writes, and every key is in it."""

import subprocess
import sys
from pathlib import Path

from baton.cluster.config import BatonConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current() -> None:
    """`make reference` writes it."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "configuration.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_key_is_on_the_page() -> None:
    text = (DOCS / "configuration.md").read_text()
    for section, field in BatonConfig.model_fields.items():
        part = text.partition(f"## [{section}]")[2].partition("\n## ")[0]
        assert all(f"| `{key}` |" in part for key in type(field.default).model_fields), section
