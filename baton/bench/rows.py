"""Results of a benchmark: rows, which are shown as a table, as JSON and as a plot.

Knows nothing of how they were measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

RANDOM = "random-0.5b"  # the name of a model that the benchmark makes itself


class Row(msgspec.Struct, frozen=True):
    """One measured figure, which may be compared with a peer and judged by a target."""

    name: str
    value: float
    unit: str
    peer: str = ""  # what the figure is compared with; "" for nothing
    ratio: float = 0.0  # value over peer's, or peer's over value; 0 without a peer
    spread: float = 0.0  # (largest - smallest) / median over the rounds
    target: float = 0.0  # bound for ``ratio``, or for ``value`` without a peer; 0 for none
    ceiling: bool = False  # whether ``target`` is an upper bound; else a lower one
    low: float = 0.0  # lower end of a 95% interval of the true median of ``value``; 0 if unknown
    high: float = 0.0  # its upper end

    @property
    def reached(self) -> bool | None:
        """Returns whether the target is met; None without a target."""
        if not self.target:
            return None
        judged = self.ratio if self.peer else self.value
        return judged <= self.target if self.ceiling else judged >= self.target


def median(values: Sequence[float]) -> float:
    """Returns the median of ``values``, the upper one if their number is even."""
    return sorted(values)[len(values) // 2]


def spread(values: Sequence[float]) -> float:
    """Returns (largest - smallest) / median of ``values``; 0 if the median is 0."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns a 95% confidence interval of the median of ``values``, for any distribution (by binomial ranks)."""
    ordered, reach = sorted(values), 0.98 * math.sqrt(len(values))
    first = max(0, math.floor((len(values) - 1) / 2 - reach))
    return ordered[first], ordered[-1 - first]


def paired(values: Sequence[float], peers: Sequence[float]) -> float:
    """Returns the median over rounds of value / peer, in which what slows a whole round cancels out."""
    return median([value / peer for value, peer in zip(values, peers, strict=True)])


def table(rows: Sequence[Row]) -> Table:
    """Returns ``rows`` as a table for a terminal."""
    shown = Table("what", "value", "beside", "ratio", "spread", "target", box=None)
    for row in rows:
        bound = f"{'<=' if row.ceiling else '>='} {row.target:g}" if row.target else ""
        verdict = {None: "", True: " [green]reached[/]", False: " [red]missed[/]"}[row.reached]
        ratio = f"{row.ratio:.3g}" if row.ratio else ""
        known = f" ({row.low:.2g} to {row.high:.2g})" if row.low or row.high else ""
        apart = "" if known else f"{row.spread:.0%}"
        shown.add_row(row.name, f"{row.value:.4g} {row.unit}{known}", row.peer, ratio, apart, bound + verdict)
    return shown


def to_json(rows: Sequence[Row]) -> str:
    """Returns all rows as JSON, each with the commit and the machine on which it was measured."""
    where = {"commit": commit(), "machine": machine()}
    return json.dumps([msgspec.to_builtins(row) | where for row in rows], indent=1)


def plot(rows: Sequence[Row], path: str) -> None:
    """Draws the ratios that have a lower bound as bars into file ``path``. Needs matplotlib (the dev extra)."""
    from matplotlib import pyplot

    shown = [row for row in rows if row.target and row.ratio and not row.ceiling]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(shown) + 1.2))
    axes.barh([row.name for row in shown], [row.ratio for row in shown], color="#4a7")
    for place, row in enumerate(shown):
        axes.plot([row.target] * 2, [place - 0.4, place + 0.4], color="#c33")
    axes.set_xlabel("share of the peer measured in the same run (red: target)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def commit() -> str:
    """Returns the short commit id of the checkout that this code is in; "" if git or the checkout is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, timeout=5,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip()


def machine() -> str:
    """Returns the number of cores and the CPU's name."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} x {names[0] if names else platform.machine()}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
