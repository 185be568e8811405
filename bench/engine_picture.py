"""Draw achieved against ceiling per op of the CPU engine: docs/figures/engine.svg.

    .venv/bin/python bench/engine_picture.py [--rows bench/results/engine.json] [--out docs/figures/engine.svg]

Reads the rows that `baton bench engine --json FILE` wrote; measures nothing. A bar is the share of the ceiling that
was measured in the same rounds (memory read for one row, attention and decoding; dot products from registers for
many rows), a thin line the spread of its rounds, a mark the target.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
from matplotlib import pyplot
from matplotlib.axes import Axes

GROUPS = {"linear": "#4477aa", "attention": "#228833", "decode": "#8a5a20"}
TARGET, SPREAD = "#cc3333", "#333333"
ROW_INCHES = 0.24
SHORT = 0.3  # a bar that its text doesn't fit into


class Bar(msgspec.Struct, frozen=True):
    """Holds one op's bar: its share of the ceiling, how far its rounds lay apart, and the target (0: none)."""

    name: str
    group: str
    ratio: float
    spread: float
    target: float
    ceiling: str


def main() -> None:
    """Reads the rows and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="bench/results/engine.json")
    parser.add_argument("--out", default="docs/figures/engine.svg")
    asked = parser.parse_args()
    rows = json.loads(Path(asked.rows).read_text())
    draw(bars(rows), rows[0], asked.out)


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """The rows that stand beside a ceiling, in the order of GROUPS and of the file."""
    found = []
    for group in GROUPS:
        for row in rows:
            if row["name"].startswith(group) and row["ratio"]:
                name = row["name"].removeprefix(f"{group}, ")
                found.append(
                    Bar(name, group, row["ratio"], row["spread"], row["target"], row["peer"].split(",")[0])
                )
    return found


def draw(shown: list[Bar], where: dict[str, Any], out: str) -> None:
    """Bars from above to below, one colour per group."""
    pyplot.rcParams |= {"svg.hashsalt": "baton", "svg.fonttype": "none"}  # the same rows give the same small file
    figure, axes = pyplot.subplots(figsize=(9, ROW_INCHES * len(shown) + 1.4))
    for place, bar in enumerate(shown):
        _bar(axes, place, bar)
    axes.set_yticks(range(len(shown)), [f"{bar.group}: {bar.name}" for bar in shown], fontsize=7)
    axes.axvline(1.0, color="#888888", linewidth=0.8)
    axes.set_xlabel(
        "share of the ceiling measured in the same rounds (red: target; line: spread of the rounds)", fontsize=8
    )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_title(f"CPU engine, {where['machine']}, commit {where['commit']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.endswith(".svg") else None)
    pyplot.close(figure)


def _bar(axes: Axes, place: int, bar: Bar) -> None:
    half = bar.ratio * bar.spread / 2
    axes.barh(place, bar.ratio, color=GROUPS[bar.group], alpha=0.95)
    axes.plot([bar.ratio - half, bar.ratio + half], [place, place], color=SPREAD, linewidth=0.8)
    at, colour = (0.01, "white") if bar.ratio >= SHORT else (bar.ratio + half + 0.01, SPREAD)
    axes.text(at, place, f"{bar.ratio:.2f} of {bar.ceiling}", va="center", fontsize=6.5, color=colour)
    if bar.target:
        axes.plot([bar.target] * 2, [place - 0.42, place + 0.42], color=TARGET, linewidth=1.6)


if __name__ == "__main__":
    main()
