"""`baton plan`: flags in; tables, JSON, plot and Helm values out.

Knows nothing of how it is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.option_groups import with_groups
from baton.console.output import guarded, print_table, results, write_json
from baton.console.planning.options import (
    AcceptanceFlag,
    AdapterCostFlag,
    JsonFlag,
    MaxBatchFlag,
    MeasuredOptions,
    PartOptions,
    PolicyFlag,
    SeedFlag,
    SloOptions,
    TraceFlag,
    WantFlag,
    acceptance_from,
    adapter_costs_from,
)
from baton.process.output_files import require_place, require_plot, write_file
from baton.protos.errors import ConfigError

if TYPE_CHECKING:  # loaded by the command that needs them
    from baton.planner.budget import WidthOutcome
    from baton.planner.costs.worker import WorkerCosts
    from baton.planner.plan import Plan


@dataclass(frozen=True)
class WorkerOptions:
    """Describes the workers, and the budget for them."""

    profile: Annotated[
        str,
        typer.Option(
            help="roofline:MODEL@GPU (more: roofline:MODEL@GPUxN,quantization=int8,kv_cache_dtype=int8), a folder "
            "of operator timings, or a paced profile; per worker"
        ),
    ]
    workers: Annotated[int, typer.Option(min=0, help="Budget: workers to divide between prefill and decode")] = 0
    accelerators: Annotated[int, typer.Option(min=0, help="Budget: accelerators")] = 0
    dollars: Annotated[float, typer.Option(min=0.0, help="Budget: $ per hour; needs --price")] = 0.0
    watts: Annotated[float, typer.Option(min=0.0, help="Budget: watts of accelerators")] = 0.0
    widths: Annotated[
        str, typer.Option(help="Accelerators per worker to try, as 1,2,4, or ranks of a measured profile")
    ] = ""
    decode_profile: Annotated[str | None, typer.Option(help="Of decode workers, if another")] = None

    @property
    def profiles(self) -> list[str]:
        """Returns the profiles that are named, that of prefill workers first."""
        return [name for name in (self.profile, self.decode_profile) if name]


@dataclass(frozen=True)
class GoalOptions(SloOptions):
    """Holds the objectives, the share of requests that must meet them, and the price."""

    want: WantFlag = 0.9
    price: Annotated[float | None, typer.Option(min=0.0, help="$ per accelerator and hour")] = None
    classes: Annotated[str, typer.Option(help="name=most prompt tokens, …")] = (
        "short=2048,medium=16384,long=1000000"
    )


@dataclass(frozen=True)
class WindowOptions(PartOptions):
    """Says which part of a trace is played, and in which windows it is resampled."""

    window: Annotated[float, typer.Option(min=1.0, help="Seconds per window of the bootstrap")] = 60.0


@dataclass(frozen=True)
class SimulationOptions:
    """Sets the simulation: routing policy, seats of a worker, costs of adapters, speculation, seed."""

    policy: PolicyFlag = "cost"
    max_batch: MaxBatchFlag = 128
    adapter_cost: AdapterCostFlag = ""
    acceptance: AcceptanceFlag = ""
    seed: SeedFlag = 0


@dataclass(frozen=True)
class ResultOptions:
    """Says what becomes of the plan: a plot, values for the chart."""

    hypothetical: Annotated[
        bool,
        typer.Option(help="Plan for another engine: workers that Baton's can't be, and no values for the chart"),
    ] = False
    plot: Annotated[str | None, typer.Option(help="Draw the dial into this .png or .svg")] = None
    helm: Annotated[str | None, typer.Option(help="Write the chart's values there")] = None


@with_groups
def plan_command(
    trace: TraceFlag,
    workers: WorkerOptions,
    goal: GoalOptions,
    part: WindowOptions,
    simulation: SimulationOptions,
    result: ResultOptions,
    measured: MeasuredOptions,
    json: JsonFlag = None,
) -> None:
    """Sweep every prefill:decode ratio over your traffic; the best one, how sure that is, and what it costs."""

    def run() -> int:
        require_place(json, result.helm)
        require_plot(result.plot)
        facts = measured.require_allowed(workers.profiles)
        if result.helm and result.hypothetical:
            raise ConfigError("--helm writes values for Baton's engine: leave --hypothetical out", "helm")
        answer, tried = _planned(trace, workers, goal, part, simulation, result.hypothetical)
        if result.plot:
            from baton.planner.plot import draw

            draw(answer, result.plot)
        if result.helm:
            write_file(result.helm, answer.helm.encode())
        if not write_json(json, msgspec.to_builtins(answer) | {"tried": msgspec.to_builtins(tried)}):
            _show(answer)
            for fact in facts:
                results().print(fact)
            if len(tried) > 1:
                _show_tried(tried)
        return 0

    raise typer.Exit(guarded(run))


def _planned(
    trace: str, workers: WorkerOptions, goal: GoalOptions, part: WindowOptions, simulation: SimulationOptions,
    hypothetical: bool,
) -> tuple[Plan, Sequence[WidthOutcome]]:  # fmt: skip
    from baton.planner.budget import Budget, of_widths, require_runnable, spend
    from baton.planner.costs.speculation import with_acceptance
    from baton.planner.costs.worker import worker_costs
    from baton.planner.plan import plan
    from baton.planner.processes import cores
    from baton.planner.simulator.cluster import ClusterScenario, SimSettings
    from baton.planner.simulator.faults import check_pools
    from baton.planner.sweep import sweep

    slo, limits = goal.slo, _classes(goal.classes)
    budget = Budget(workers.workers, workers.accelerators, workers.dollars, workers.watts, goal.price)
    profiles = of_widths(workers.profile, _widths(workers.widths))
    if workers.decode_profile and not budget.workers:
        raise ConfigError("with a decode profile of its own the budget is --workers", "decode_profile")
    writes = worker_costs(workers.decode_profile) if workers.decode_profile else None
    if writes and not hypothetical:
        require_runnable(writes)
    load, chances = part.read(trace), acceptance_from(simulation.acceptance)
    adapters = adapter_costs_from(simulation.adapter_cost)
    told = Console(stderr=True, highlight=False)

    def planned(reads: WorkerCosts, count: int) -> Plan:
        check_pools((), (reads, writes or reads))
        settings = SimSettings(
            0, count, policy=simulation.policy, max_batch=simulation.max_batch, seed=simulation.seed
        )
        settings = settings.with_chunks_of(reads, writes or reads)
        costs, written = (
            adapters.on(reads, load.adapter_shares, "prefill"),
            adapters.on(writes or reads, load.adapter_shares, "decode"),
        )
        scenario = ClusterScenario(settings, costs, with_acceptance(written, chances), load)
        found, flights = sweep(
            count, scenario, slo, part.window,
            lambda r: told.print(f"{r.name}: {r.score.attainment:.1%} meet the SLOs", style="dim"), cores(),
        )  # fmt: skip
        answer = plan(found, flights, scenario, slo, goal.want, limits, goal.price)
        if not (load.adapted_share or simulation.adapter_cost):
            return answer
        return msgspec.structs.replace(
            answer, advice=(*answer.advice, adapters.about(load.adapter_shares, reads, writes or reads))
        )

    return spend(budget, profiles, planned, hypothetical)


def _classes(text: str) -> dict[str, int]:
    try:
        found = [(name.strip(), int(most)) for name, most in (item.split("=") for item in text.split(","))]
    except ValueError as error:
        raise ConfigError(f"--classes {text!r}: write name=tokens,name=tokens", "classes") from error
    if not all(name and most > 0 for name, most in found) or len(dict(found)) < len(found):
        raise ConfigError(f"--classes {text!r}: each needs a name of its own, and tokens above 0", "classes")
    return dict(found)


def _widths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--widths {text!r}: write numbers of accelerators, as 2,4,8", "widths") from error


def _show_tried(tried: Sequence[WidthOutcome]) -> None:
    table = Table("per worker", "workers", "best ratio", "SLOs met", "goodput/s", "")
    for t in tried:
        found = (t.ratio, f"{t.attainment:.1%}", f"{t.goodput:.2f}") if t.ratio else ("", "", "")
        table.add_row(t.profile.rpartition("@")[2], str(t.workers), *found, t.reason)
    print_table(table)


def _show(answer: Plan) -> None:
    out, found = results(), answer.sweep
    table = Table("ratio", "SLOs met", "TTFT s", "p99", "TPOT ms", "P steps", "D steps", "hits")
    for r in (*found.ratios, found.colocated):
        s = r.score
        low, high = found.plateau
        mark = "bold" if r == answer.chosen else ("green" if r.prefill and low <= r.prefill <= high else None)
        table.add_row(
            r.name, f"{s.attainment:.1%}", f"{s.ttft.mean:.2f}", f"{s.ttft.p99:.2f}", f"{s.tpot.mean * 1e3:.1f}",
            f"{r.prefill_busy:.0%}", f"{r.decode_busy:.0%}", f"{r.hit_rate:.0%}", style=mark,
        )  # fmt: skip
    print_table(table)
    low, high = found.interval
    answered = "answer" if answer.met else "no answer; the best of these"
    out.print(
        f"{answered}: {answer.chosen.name} on {answer.accelerators} accelerators,"
        f" {answer.chosen.score.goodput:.2f} good requests/s"
    )
    out.print(f"best split {found.best.name}; over resampled windows 90% lie in {low}P to {high}P")
    for verdict in answer.classes:
        word = "disaggregate" if verdict.disaggregate else "don't disaggregate"
        out.print(f"{verdict.name} ({verdict.requests:,} requests): {word}: {verdict.reason}")
    for line in answer.advice:
        out.print(line)
    if answer.price is not None:
        p = answer.price
        apart = f" (input {_dollars(p.per_million_input)}, output {_dollars(p.per_million_output)})"
        out.print(
            f"${p.per_hour:.2f} per hour: {_dollars(p.per_million)} per 1M tokens"
            f"{apart if p.per_million_input is not None else ''},"
            f" {_dollars(p.per_million_good)} per 1M of requests within the SLOs"
        )
    out.print(answer.helm, end="", markup=False, soft_wrap=True)  # a wrapped comment would be no YAML


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"${value:.2f}"
