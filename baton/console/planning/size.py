"""`baton size`: how many of which accelerator for a model, a trace and SLOs.

Knows nothing of how it is found; it reads flags and prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from baton.console.option_groups import with_groups
from baton.console.output import guarded, print_table, results, write_json
from baton.console.planning.options import (
    JsonFlag,
    MeasuredOptions,
    PartOptions,
    SloOptions,
    TraceFlag,
    WantFlag,
)
from baton.process.output_files import require_place
from baton.protos.errors import ConfigError

if TYPE_CHECKING:  # loaded by the command that needs them
    from baton.planner.costs.measured_forms import MeasuredForms
    from baton.planner.size import AcceleratorSizing


@dataclass(frozen=True)
class CandidateOptions:
    """Names the accelerators that are tried, and the most workers."""

    gpus: Annotated[str, typer.Option(help="Which to try: name or name=$ per hour, …")] = "h100,h200,b200,a100"
    most: Annotated[int, typer.Option(min=1, help="Workers to try at most")] = 32


@dataclass(frozen=True)
class SizeGoalOptions(SloOptions):
    """Holds the objectives, and the share of requests that must meet them."""

    ttft: Annotated[float, typer.Option("--ttft", min=0.001, help="SLO: seconds to the first token")] = 2.0
    want: WantFlag = 0.9


@dataclass(frozen=True)
class AllowedFormOptions(MeasuredOptions):
    """Says which forms of weights and KV are allowed."""

    exact: Annotated[bool, typer.Option(help="Round nothing: neither weights nor KV that come plain")] = False


@with_groups
def size_command(
    model: Annotated[str, typer.Option(help="A known model's name, or a config.json")],
    trace: TraceFlag,
    candidates: CandidateOptions,
    goal: SizeGoalOptions,
    forms: AllowedFormOptions,
    part: PartOptions,
    json: JsonFlag = None,
) -> None:
    """Find the fewest workers of each accelerator that meet the SLOs, and where their memory goes."""

    def run() -> int:
        from baton.console.planning.rank_costs import runnable_widths
        from baton.planner.costs.measured_forms import MeasuredForms
        from baton.planner.costs.model_shape import model_shape
        from baton.planner.size import SizingQuestion, size

        require_place(json)
        names, prices = _gpus(candidates.gpus)
        sweep = MeasuredForms.read(forms.measured) if forms.measured else None
        question = SizingQuestion(
            part.read(trace), goal.slo, goal.want, candidates.most, forms.exact, sweep, forms.most_loss
        )
        found = size(model_shape(model), question, names, prices)
        if not write_json(json, msgspec.to_builtins(found)):
            _show(found, sweep, forms)
            if widths := runnable_widths(model):
                results().print(f"ranks of a worker on a CPU that the model runs on: {widths}")
        return 0

    raise typer.Exit(guarded(run))


def _show(found: Sequence[AcceleratorSizing], sweep: MeasuredForms | None, measured: MeasuredOptions) -> None:
    table = Table("accelerator", "weights, KV", "answer", "in all", "SLOs met", "weights", "KV", "tokens", "$/h")
    for s in found:
        met = f"{s.found.score.attainment:.1%}" if s.found else "-"
        table.add_row(
            s.accelerator, s.form, s.found.name if s.found else "none",
            str(s.accelerators) if s.found else "-", met,
            f"{s.memory.weights / 1e9:.0f} GB", f"{s.memory.kv / 1e9:.0f} GB", f"{s.memory.kv_tokens:,}",
            "-" if s.per_hour is None else f"{s.per_hour:.2f}",
        )  # fmt: skip
    out = results()
    print_table(table)
    for s in found:
        if s.settings and s.found:
            out.print(f"{s.accelerator}: with {', '.join(f'worker.{k} = {v}' for k, v in s.settings.items())}")
            if sweep and (row := sweep.of(s.settings)):
                out.print(f"{s.accelerator}: {measured.words(row)}")
        if s.why:
            out.print(f"{s.accelerator}: {s.why}")


def _gpus(text: str) -> tuple[list[str], dict[str, float]]:
    names, prices = [], {}
    for item in text.lower().split(","):
        name, priced, price = item.strip().partition("=")
        names.append(name)
        try:
            if priced:
                prices[name] = _dollars(price)
        except ValueError as error:
            text = f"--gpus {item!r}: write name or name=price, in $ per hour and 0 or more"
            raise ConfigError(text, "gpus") from error
    return names, prices


def _dollars(text: str) -> float:
    """Returns a price. Raises ValueError for what is none: below 0, infinite, or no number."""
    price = float(text)
    if not 0 <= price < math.inf:
        raise ValueError(text)
    return price
