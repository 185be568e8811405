"""CONTRIBUTING.md lists every target of the Makefile, and none that isn't there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_target_is_in_the_table_and_no_other() -> None:
    targets = set(re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split())
    rows = re.findall(r"^\| (`make .+?) \| ", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    named = {target for row in rows for target in re.findall(r"`make ([\w-]+)`", row)}
    assert named == targets
