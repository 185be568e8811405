"""A measured figure as a row, the rows as a table and as JSON. Torch-free; knows nothing of how one is measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
COMMIT_ENV = "BATON_COMMIT"


class Where(msgspec.Struct, frozen=True):
    """Names the machine, the commit and the date of a run's figures."""

    machine: str
    commit: str
    date: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """``ratio`` is of ``ceiling``, a row's name of the same run, or of ``peer``, another way to the same result.

    ``spread``: by how much the medians of the odd and of the even samples differ, as a share (A/A). ``error``: how
    far the result that was timed is off a plain one, ‖found - wanted‖ / ‖wanted‖. ``said``: why there is no value,
    or what else must be known. ``launched``: the kernels that a passing test or shape launched.
    """

    part: str
    name: str
    value: float | None = None
    unit: str = ""
    against: str = ""
    ratio: float | None = None
    spread: float | None = None
    target: float | None = None
    said: str = ""
    error: float | None = None
    launched: tuple[str, ...] = ()


class Sample(msgspec.Struct, frozen=True):
    """Seconds of a call, over and over."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Returns the median of the sample, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Returns how far the medians of odd and even samples lie apart, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        halves = [statistics.median(self.seconds[at::2]) for at in (0, 1)]
        return abs(halves[0] - halves[1]) / self.median


class Ceilings(msgspec.Struct, frozen=True):
    """Holds this run's ceilings: bytes read per second, bytes read and written per second, bf16 operations per
    second.
    """

    read: float
    copy: float
    flops: float


def rated(
    part: str, name: str, sample: Sample, work: float, of: str, ceilings: Ceilings, target: float | None = None
) -> Row:
    """Returns a row that gives a call's rate as a share of the ceiling ``of``: ``work`` is in bytes ("read",
    "copy") or operations ("flops").
    """
    rate, ceiling = (
        work / sample.median,
        {"read": ceilings.read, "copy": ceilings.copy, "flops": ceilings.flops}[of],
    )
    unit, size = ("TFLOP/s", 1e12) if of == "flops" else ("GB/s", 1e9)
    return Row(
        part=part,
        name=name,
        value=round(rate / size, 2),
        unit=unit,
        against=f"{of} {ceiling / size:.0f} {unit}",
        ratio=round(rate / ceiling, 4),
        spread=round(sample.spread, 4),
        target=target,
    )


def versus(
    part: str, name: str, sample: Sample, peer: str, other: Sample, target: float | None = None, said: str = ""
) -> Row:
    """Returns a row that says how many times as fast as a peer a call is, on the same inputs in the same run."""
    return Row(
        part=part,
        name=name,
        value=round(sample.median * 1e6, 2),
        unit="us",
        against=f"{peer} {other.median * 1e6:.1f} us",
        ratio=round(other.median / sample.median, 4),
        spread=round(max(sample.spread, other.spread), 4),
        target=target,
        said=said,
    )


def absent(part: str, name: str, why: str) -> Row:
    """A figure that could not be taken, and why."""
    return Row(part=part, name=name, said=" ".join(why.split())[:300])


def commit(root: Path = ROOT) -> str:
    """Returns $BATON_COMMIT, as a copy without git is told, else the checkout's, "+" behind it where files differ;
    empty without either.
    """
    if told := os.environ.get(COMMIT_ENV):
        return told
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return found.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def where(machine: str) -> Where:
    """Returns the machine's name with the present commit and time."""
    return Where(machine, commit(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))


def table(rows: Iterable[Row]) -> str:
    """Aligned columns, a part's rows together; a target that is missed is marked."""
    head = ("part", "what", "value", "against", "ratio", "target", "A/A", "off")
    lines: list[Sequence[str]] = [head]
    for row in rows:
        value = row.said if row.value is None else f"{row.value:g} {row.unit}"
        missed = row.target is not None and row.ratio is not None and row.ratio < row.target
        lines.append(
            (
                *(row.part, row.name, value, row.against),
                "" if row.ratio is None else f"{row.ratio:.2f}",
                "" if row.target is None else f"{row.target:g}{' missed' if missed else ''}",
                "" if row.spread is None else f"{row.spread:.1%}",
                "" if row.error is None else f"{row.error:.0e}",
            )
        )
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    widths[2] = min(widths[2], 40)
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def merged(before: Iterable[Row], now: Iterable[Row]) -> list[Row]:
    """Rows of several calls on one machine: the newest of each name, a part's in its order."""
    found = {(row.part, row.name): row for row in before}
    found.update({(row.part, row.name): row for row in now})
    return list(found.values())


def write(path: Path, place: Where, rows: Sequence[Row]) -> None:
    """One row a line, so that a diff shows what moved; rows of another machine or commit don't stay."""
    before: list[Row] = []
    if path.exists():
        kept = json.loads(path.read_text())
        if (kept["machine"], kept["commit"]) == (place.machine, place.commit):
            before = msgspec.convert(kept["rows"], list[Row])
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "".join(
        f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in msgspec.structs.asdict(place).items()
    )
    body = ",\n".join(f"  {msgspec.json.encode(row).decode()}" for row in merged(before, rows))
    path.write_text("{\n" + head + ' "rows": [\n' + body + "\n ]\n}\n")


def passed(path: Path = RESULTS / "gpu.json") -> dict[str, str]:
    """Ops whose checks passed on a GPU, and by which sources: what the support table says of them."""
    if not path.exists():
        return {}
    rows = msgspec.convert(json.loads(path.read_text())["rows"], list[Row])
    return {row.name: row.against for row in rows if row.part == "checks" and row.value == 1}
