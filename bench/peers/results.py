"""The file of a comparison that is taken in parts, on several kinds of machine. Knows nothing of measuring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.rows import Row, commit, machine, to_json
from baton.evaluate.workload import PROMPT
from baton.kernels.abi.native import isa

Rows = list[dict[str, Any]]


def merge(path: str, rows: Sequence[Row], memory: str = "") -> None:
    """Write ``rows`` with the ISA, and the ``memory`` read of the same minute, where it is known.

    Of those there, the ones that compare something else or come from another kind of machine stay, in their places.
    """
    where = {"isa": isa()} | ({"memory_read": memory} if memory else {})
    fresh = {_key(row | where): row | where for row in json.loads(to_json(rows))}
    kept = [fresh.pop(_key(row), row) for row in _read(path)]
    Path(path).write_text(json.dumps([*kept, *fresh.values()], indent=1) + "\n")


def measured(path: str, size: str, scheme: str) -> bool:
    """Returns whether the file at ``path`` has the last row of ``size`` in ``scheme`` by this commit on such a
    machine.
    """
    last, here = f"prompt of {PROMPT} tokens, {size} {scheme} (", (commit(), machine(), isa())
    asked = [row for row in _read(path) if row["name"].startswith(last)]
    return any((row["commit"], row["machine"], row.get("isa")) == here for row in asked)


def _read(path: str) -> Rows:
    if not path or not Path(path).exists():
        return []
    found: Rows = json.loads(Path(path).read_text())
    return found


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns what identifies a comparison: its name, the peer without its figure and version, the machine and the
    ISA.
    """
    return row["name"], row["peer"].split(" ")[0].split(",")[0], row["machine"], row.get("isa", "")
