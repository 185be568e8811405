"""The file of a comparison that is taken in parts. Knows nothing of engines or of measuring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.rows import Row, commit, to_json
from baton.evaluate.workload import PROMPT

Rows = list[dict[str, Any]]


def merge(path: str, rows: Sequence[Row]) -> None:
    """Write ``rows``; of those there, the ones that compare something else stay, in their places."""
    fresh = {_key(row): row for row in json.loads(to_json(rows))}
    kept = [fresh.pop(_key(row), row) for row in _read(path)]
    Path(path).write_text(json.dumps([*kept, *fresh.values()], indent=1) + "\n")


def measured(path: str, size: str, scheme: str) -> bool:
    """Whether the file has the last question of ``size`` in ``scheme``, asked by this commit."""
    last = f"prompt of {PROMPT} tokens, {size} {scheme} ("
    return any(row["name"].startswith(last) and row["commit"] == commit() for row in _read(path))


def _read(path: str) -> Rows:
    if not path or not Path(path).exists():
        return []
    found: Rows = json.loads(Path(path).read_text())
    return found


def _key(row: dict[str, Any]) -> tuple[str, str]:
    """What is compared with whom; a peer's figure and version follow its name."""
    return row["name"], row["peer"].split(" ")[0].split(",")[0]
