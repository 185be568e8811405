"""`baton size`: how many of which accelerator for a model, a trace and SLOs.

Knows nothing of how it is found; it reads flags and prints.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.output import guarded, write_json
from baton.console.planning import plan
from baton.process.output_files import require_place
from baton.protos.errors import ConfigError


def size_command(
    model: Annotated[str, typer.Option(help="A known model's name, or a config.json")],
    trace: plan.TraceFlag,
    gpus: Annotated[str, typer.Option(help="Which to try: name or name=$ per hour, …")] = "h100,h200,b200,a100",
    most: Annotated[int, typer.Option(min=1, help="Workers to try at most")] = 32,
    ttft: plan.TtftFlag = 2.0,
    tpot: plan.TpotFlag = 0.1,
    want: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that must meet the SLOs")] = 0.9,
    measured: plan.MeasuredFlag = None,
    most_loss: plan.MostLossFlag = 0.01,
    exact: Annotated[bool, typer.Option(help="Round nothing: neither weights nor KV that come plain")] = False,
    speed: plan.SpeedFlag = 1.0,
    start: plan.FromFlag = 0.0,
    seconds: plan.SecondsFlag = 0.0,
    json: plan.JsonFlag = None,
) -> None:
    """Find the fewest workers of each accelerator that meet the SLOs, and where their memory goes."""

    def run() -> int:
        from baton.console.planning.rank_costs import runnable_widths
        from baton.planner.costs.measured_forms import MeasuredForms
        from baton.planner.costs.model_shape import model_shape
        from baton.planner.score import Slo
        from baton.planner.size import SizingQuestion, size

        require_place(json)
        names, prices = _gpus(gpus)
        part = plan.load(trace, speed, start, seconds, skip_bad=False)
        sweep = MeasuredForms.read(measured) if measured else None
        question = SizingQuestion(part, Slo(ttft, tpot), want, most, exact, sweep, most_loss)
        found = size(model_shape(model), question, names, prices)
        if write_json(json, msgspec.to_builtins(found)):
            return 0
        table = Table(
            "accelerator", "weights, KV", "answer", "in all", "SLOs met", "weights", "KV", "tokens", "$/h"
        )
        for s in found:
            met = f"{s.found.score.attainment:.1%}" if s.found else "-"
            table.add_row(
                s.accelerator, s.form, s.found.name if s.found else "none",
                str(s.accelerators) if s.found else "-", met,
                f"{s.memory.weights / 1e9:.0f} GB", f"{s.memory.kv / 1e9:.0f} GB", f"{s.memory.kv_tokens:,}",
                "-" if s.per_hour is None else f"{s.per_hour:.2f}",
            )  # fmt: skip
        out = Console(highlight=False)
        out.print(table)
        for s in found:
            if s.settings and s.found:
                out.print(f"{s.accelerator}: with {', '.join(f'worker.{k} = {v}' for k, v in s.settings.items())}")
                if sweep and (row := sweep.of(s.settings)):
                    out.print(f"{s.accelerator}: {plan.measured_words(row, measured)}")
            if s.why:
                out.print(f"{s.accelerator}: {s.why}")
        if widths := runnable_widths(model):
            out.print(f"ranks of a worker on a CPU that the model runs on: {widths}")
        return 0

    raise typer.Exit(guarded(run))


def _gpus(text: str) -> tuple[list[str], dict[str, float]]:
    names, prices = [], {}
    for item in text.lower().split(","):
        name, _, price = item.strip().partition("=")
        names.append(name)
        try:
            if price:
                prices[name] = float(price)
        except ValueError as error:
            raise ConfigError(f"--gpus {item!r}: write name or name=price", "gpus") from error
    return names, prices
