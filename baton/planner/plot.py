"""Plot of a sweep: goodput and attainment over every ratio, the plateau shaded, cliffs named.

Knows nothing of how it was found. matplotlib is imported only here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from baton.planner.plan import Plan
from baton.planner.sweep import RatioOutcome
from baton.process.output_files import require_plot
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(found: Plan, path: str) -> None:
    """Writes the plot to ``path``, a .png or .svg.

    Raises ConfigError for another format, without matplotlib, or if writing fails.
    """
    require_plot(path)
    figure, axes = _canvas()
    ratios = found.sweep.ratios
    at = [r.prefill for r in ratios]
    axes.axvspan(found.sweep.plateau[0] - 0.5, found.sweep.plateau[1] + 0.5, color="#2a9d8f", alpha=0.15)
    axes.plot(at, [r.score.attainment * 100 for r in ratios], marker="o", color="#264653", label="every SLO met")
    axes.plot(at, [r.score.late_first * 100 for r in ratios], ls="--", color="#e76f51", label="first token late")
    axes.plot(at, [r.score.late_tokens * 100 for r in ratios], ls=":", color="#8d5fd3", label="tokens too slow")
    colocated = found.sweep.colocated.score.attainment * 100
    axes.axhline(colocated, lw=1, color="#888888", label=f"colocated ({colocated:.1f}%)")
    for cliff in found.sweep.cliffs:
        at_cliff = (cliff.prefill, _share(ratios, cliff.prefill))
        axes.annotate(
            f"cliff: {cliff.side}", at_cliff, (0, -28), textcoords="offset points", fontsize=8, ha="center",
            arrowprops={"arrowstyle": "->", "lw": 0.7},
        )  # fmt: skip
    axes.set_xticks(at, [f"{r.prefill}:{r.decode}" for r in ratios])
    axes.set(xlabel="prefill : decode workers", ylabel="% of requests", ylim=(-3, 103))
    slo = found.slo
    axes.set_title(f"best {found.sweep.best.name}; TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms")
    axes.legend(fontsize=8)
    _save(figure, path)


def _share(ratios: Iterable[RatioOutcome], prefill: int) -> float:
    return next(r.score.attainment for r in ratios if r.prefill == prefill) * 100


def _canvas() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Figure, path: str) -> None:
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error}", "plot") from error
