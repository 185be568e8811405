"""Plots the size of each scheme of a sweep against its added loss, with the frontier of schemes that no other
betters.

Knows nothing of how rows were measured. matplotlib is imported only in this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.evaluate.sweep import SweepRow


def frontier(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows whose scheme no other beats in both size and added loss (the Pareto frontier), smallest
    first.
    """
    found: list[SweepRow] = []
    for row in sorted(rows, key=lambda row: (row.gigabytes, row.added)):
        if not found or row.added < found[-1].added:
            found.append(row)
    return found


def draw(rows: Sequence[SweepRow], path: str) -> None:
    """Writes a plot to ``path``: gigabytes against added loss in percent, with its interval, and the frontier as a
    line.

    A dot's size is the scheme's decode speed with 16 sequences. Raises ConfigError if writing fails.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes, fastest = figure.subplots(), max(row.decode_many for row in rows)
    best = frontier(rows)
    axes.plot([row.gigabytes for row in best], [100 * row.added for row in best], color="#2a9d8f", lw=1)
    for row in rows:
        at, size = (row.gigabytes, 100 * row.added), 30 + 170 * row.decode_many / fastest
        axes.vlines(row.gigabytes, 100 * row.low, 100 * row.high, color="#888888", lw=0.8)
        axes.scatter(*at, s=size, color="#2a9d8f" if row in best else "#e76f51", zorder=2)
        axes.annotate(row.scheme, at, (7, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="GB that a decode step reads of the weights", ylabel="% added to the loss")
    axes.set_title("dots: tokens per second at 16 sequences; bars: 95%")
    try:
        with rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "baton"}
        ):  # text stays text, equal rows equal files
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}", "plot") from error
