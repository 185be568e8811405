"""Keeps rows in a folder as they come, so that nothing is lost whatever ends a run. Torch-free.

Knows nothing of what the rows are of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.cuda.isolated import Outcome
from bench.cuda.rows import Row, Where, absent, table, write

QUIET = ("test", "listing")  # parts whose rows are only counted in the printed table


def is_wrong(row: Row) -> bool:
    """Returns whether a row says that a check failed or a result was wrong."""
    return (row.unit == "passed" and row.value == 0) or row.said.startswith("WRONG")


class PartTime(msgspec.Struct, frozen=True):
    """Says how a part went: its cases, how many of them ended badly or never began, seconds in all."""

    part: str
    cases: int
    failed: int
    unrun: int
    seconds: float


class Results:
    """Appends to the files of ``folder``: rows.jsonl, failed.log, parts.json, gpu.json."""

    def __init__(self, folder: Path, place: Where) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._place = folder, place
        self._rows: list[Row] = []
        self._parts: list[PartTime] = []

    @property
    def failed(self) -> bool:
        """Tells whether a check said no, a result was wrong or a case ended badly."""
        return any(map(is_wrong, self._rows)) or any(part.failed for part in self._parts)

    def add(self, row: Row) -> None:
        """Keeps a row, and prints it."""
        kept = msgspec.structs.asdict(self._place) | msgspec.structs.asdict(row)
        with (self._folder / "rows.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(kept) + b"\n")
        if row.part in QUIET and row.value == 1:
            return
        self._rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)

    def end(self, outcome: Outcome) -> None:
        """Keeps what a case printed that ended badly, and says so in a row; the collected rows are written."""
        if outcome.said and not (outcome.case.part == "checks" and outcome.unrun):  # ops' rows count these
            self.add(absent(outcome.case.part, outcome.case.name, outcome.said))
        if outcome.output:
            with (self._folder / "failed.log").open("a") as file:
                file.write(f"==== {outcome.case.part}: {outcome.case.name}: {outcome.said}\n{outcome.output}\n")
        if outcome.case.part not in (*QUIET, "checks"):
            write(self._folder / "gpu.json", self._place, self._rows)

    def part(self, name: str, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Notes how long a part took."""
        unrun = sum(outcome.unrun for outcome in outcomes)
        failed = sum(bool(outcome.said) or any(map(is_wrong, outcome.rows)) for outcome in outcomes) - unrun
        self._parts.append(PartTime(name, len(outcomes), failed, unrun, round(seconds, 1)))
        (self._folder / "parts.json").write_text(json.dumps(msgspec.to_builtins(self._parts), indent=1) + "\n")
        write(self._folder / "gpu.json", self._place, self._rows)

    def summary(self) -> str:
        """Returns a line per part, and all seconds."""
        write(self._folder / "gpu.json", self._place, self._rows)
        lines = [
            f"{part.part:<10} {part.cases:4} cases, {part.failed} failed, {part.unrun} not run, {part.seconds} s"
            for part in self._parts
        ]
        total = sum(part.seconds for part in self._parts)
        return "\n".join([*lines, f"{total:.0f} s in all; kept in {self._folder}"])
