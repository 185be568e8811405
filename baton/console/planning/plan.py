"""`baton sim` over a trace and `baton plan`: flags in; tables, JSON, plot and Helm values out.

Knows nothing of how it is simulated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.cluster.asking import router
from baton.console.output import guarded, write_json
from baton.process.output_files import require_place, write_file
from baton.protos.errors import ConfigError

if TYPE_CHECKING:  # loaded by the command that needs them
    from baton.planner.budget import WidthOutcome
    from baton.planner.costs.measured_forms import MeasuredForm
    from baton.planner.costs.worker import WorkerCosts
    from baton.planner.figures import Distribution
    from baton.planner.plan import Plan
    from baton.planner.traces.trace import Trace

TraceFlag = Annotated[str, typer.Option(help="A .jsonl (Mooncake) or .csv (Azure) file")]
ProfileFlag = Annotated[
    str,
    typer.Option(
        help="roofline:MODEL@GPU (more: roofline:MODEL@GPUxN,quantization=int8,kv_cache_dtype=int8), a folder of "
        "operator timings, or a paced profile; per worker"
    ),
]
SpeedFlag = Annotated[float, typer.Option(min=0.001, help="Replay the trace this much faster")]
FromFlag = Annotated[float, typer.Option("--from", min=0.0, help="Seconds into the trace to begin at")]
SecondsFlag = Annotated[float, typer.Option(min=0.0, help="Seconds of the trace to take; 0: all")]
TtftFlag = Annotated[float, typer.Option("--ttft", min=0.001, help="SLO: seconds to the first token")]
TpotFlag = Annotated[float, typer.Option("--tpot", min=0.0001, help="SLO: seconds per token after it")]
JsonFlag = Annotated[str | None, typer.Option("--json", help="Write the result there; - prints it")]
MeasuredFlag = Annotated[
    str | None,
    typer.Option(help="JSON of baton evaluate --sweep: what forms of weights and KV lose and how fast they are"),
]
MostLossFlag = Annotated[float, typer.Option(min=0.0, help="With --measured: the most loss of a form, as a share")]
PolicyFlag = Annotated[str, typer.Option(help="Routing policy")]
AdapterCostFlag = Annotated[
    float,
    typer.Option(min=1.0, help="How many times as long a step takes whose tokens are all on LoRA adapters"),
]
AcceptanceFlag = Annotated[
    str,
    typer.Option(
        help="Speculation: chances that drafted tokens stand, by position, as 0.8,0.6,0.5; or the URL of a router, "
        "whose workers' own are taken (key: BATON_API_KEY)"
    ),
]
SeedFlag = Annotated[int, typer.Option(help="Same seed, same answer")]


def measured_words(row: MeasuredForm, path: str | None) -> str:
    """Returns the measured loss and speed of a form as a sentence; ``path`` is the measurement's file."""
    speed = f"{row.decode_one:,.0f} tok/s alone, {row.decode_many:,.0f} of 16"
    return (
        f"{row.scheme} loses {row.added:.3%} ({row.low:.3%} to {row.high:.3%}); {speed} where {path} was measured"
    )


def require_allowed(profiles: Sequence[str], measured: str | None, most_loss: float) -> list[str]:
    """Returns sentences about the measured loss and speed of the forms that roofline profiles name.

    Raises ConfigError for a form that loses more than ``most_loss`` (a share), or was not measured.
    """
    from baton.planner.costs.measured_forms import MeasuredForms
    from baton.planner.costs.roofline_name import OPTIONS, is_roofline, parse

    if measured is None:
        return []
    sweep, found = MeasuredForms.read(measured), []
    for name in (name for name in profiles if is_roofline(name)):
        of = parse(name)
        settings = {key: getattr(of, key) for key in OPTIONS}
        if why := sweep.refusal(settings, most_loss):
            raise ConfigError(f"{name}: {why}: sweep it as well, or raise --most-loss", "most_loss")
        if (row := sweep.of(settings)) is not None:
            found.append(measured_words(row, measured))
    return list(dict.fromkeys(found))


def acceptance_from(text: str) -> tuple[float, ...]:
    """Returns the acceptance probabilities by draft position that --acceptance lists, or those of the router whose
    URL it is.

    Raises ConfigError.
    """
    from baton.planner.costs.speculation import acceptance_of, parse_acceptance

    if not text.startswith(("http://", "https://")):
        return parse_acceptance(text)
    return acceptance_of(router(text, os.environ.get("BATON_API_KEY", "")).call("GET", "/v1/cluster"))


def load(trace: str, speed: float, start: float, seconds: float, skip_bad: bool) -> Trace:
    """Returns the trace from second ``start`` on, for ``seconds`` (0: to its end), replayed ``speed`` times as
    fast.

    Raises ConfigError for fewer than 2 requests, TraceError at an unreadable line unless ``skip_bad``.
    """
    from baton.planner.traces.trace import read_trace

    whole = read_trace(trace, skip_bad)
    part = whole.between(start, start + seconds if seconds else float("inf"))
    if len(part.requests) < 2:
        raise ConfigError(f"{trace} has {len(part.requests)} requests from second {start:g} on; take more", "trace")
    return part.faster(speed)


def simulate_command(
    trace: str, profile: str, decode_profile: str | None, json: str | None, slo: tuple[float, float],
    part: tuple[float, float, float], pools: Sequence[str] = (), failures: Sequence[str] = (),
    adapter_cost: float = 1.0, acceptance: str = "", **cluster: Any,
) -> int:  # fmt: skip
    """Simulates one ratio over a trace and prints the outcome; returns 0.

    ``slo`` is (TTFT, TPOT) in seconds, ``part`` is (speed, start, seconds) as ``load`` takes them, ``cluster`` the
    fields of SimSettings.
    """
    from baton.planner.costs.speculation import with_acceptance
    from baton.planner.costs.worker import with_adapters, worker_costs
    from baton.planner.score import Slo
    from baton.planner.simulator.cluster import ClusterScenario, SimSettings
    from baton.planner.simulator.faults import parse_failure, parse_pool
    from baton.planner.sweep import miss_reason, simulate

    settings = SimSettings(**cluster)
    load_from = load(trace, *part, skip_bad=False)
    share = load_from.adapted_share
    costs = with_adapters(worker_costs(profile, settings.prefill_chunk), share, adapter_cost)
    writes = worker_costs(decode_profile, settings.prefill_chunk) if decode_profile else None
    chances = acceptance_from(acceptance)
    decode = with_acceptance(with_adapters(writes, share, adapter_cost) if writes else costs, chances)
    began = time.process_time()
    more = [
        msgspec.structs.replace(
            pool, costs=with_acceptance(with_adapters(pool.costs, share, adapter_cost), chances)
        )
        for pool in (parse_pool(text, settings.prefill_chunk) for text in pools)
    ]
    deaths = [parse_failure(text) for text in failures]
    found = simulate(ClusterScenario(settings, costs, decode, load_from, more, deaths), Slo(*slo))
    took = time.process_time() - began
    result = {"trace": load_from.source, "profile": costs.about, "acceptance": chances, "cpu_seconds": took}
    if write_json(json, result | {"result": msgspec.to_builtins(found)}):
        return 0
    out, s = Console(highlight=False), found.score
    out.print(
        f"{found.name}, {costs.about}: {s.requests:,} requests, {s.requests / took:,.0f} simulated per CPU second"
    )
    table = Table("", "mean", "median", "p90", "p99")
    for name, f in (("TTFT s", s.ttft), ("TPOT ms", _scaled(s.tpot, 1e3)), ("latency s", s.latency)):
        table.add_row(name, *(f"{getattr(f, x):.2f}" for x in ("mean", "median", "p90", "p99")))
    out.print(table)
    out.print(f"every SLO met by {s.attainment:.1%} ({s.goodput:.2f}/s); {miss_reason(found)}")
    out.print(f"prefix hits {found.hit_rate:.1%} of prompt tokens")
    if found.deaths:
        out.print(f"{found.deaths} deaths: {found.moved} answers moved, {found.read_again} prompts read again")
    return 0


def _scaled(f: Distribution, by: float) -> Distribution:
    return type(f)(*(getattr(f, name) * by for name in f.__struct_fields__))


def plan_command(
    trace: TraceFlag,
    profile: ProfileFlag,
    workers: Annotated[int, typer.Option(min=0, help="Budget: workers to divide between prefill and decode")] = 0,
    accelerators: Annotated[int, typer.Option(min=0, help="Budget: accelerators")] = 0,
    dollars: Annotated[float, typer.Option(min=0.0, help="Budget: $ per hour; needs --price")] = 0.0,
    watts: Annotated[float, typer.Option(min=0.0, help="Budget: watts of accelerators")] = 0.0,
    widths: Annotated[
        str, typer.Option(help="Accelerators per worker to try, as 1,2,4, or ranks of a measured profile")
    ] = "",
    decode_profile: Annotated[str | None, typer.Option(help="Of decode workers, if another")] = None,
    ttft: TtftFlag = 10.0,
    tpot: TpotFlag = 0.1,
    want: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that must meet the SLOs")] = 0.9,
    price: Annotated[float | None, typer.Option(min=0.0, help="$ per accelerator and hour")] = None,
    classes: Annotated[
        str, typer.Option(help="name=most prompt tokens, …")
    ] = "short=2048,medium=16384,long=1000000",
    speed: SpeedFlag = 1.0,
    start: FromFlag = 0.0,
    seconds: SecondsFlag = 0.0,
    window: Annotated[float, typer.Option(min=1.0, help="Seconds per window of the bootstrap")] = 60.0,
    policy: PolicyFlag = "cost",
    adapter_cost: AdapterCostFlag = 1.0,
    acceptance: AcceptanceFlag = "",
    seed: SeedFlag = 0,
    hypothetical: Annotated[
        bool,
        typer.Option(help="Plan for another engine: workers that Baton's can't be, and no values for the chart"),
    ] = False,
    plot: Annotated[str | None, typer.Option(help="Draw the dial into this .png or .svg")] = None,
    helm: Annotated[str | None, typer.Option(help="Write the chart's values there")] = None,
    measured: MeasuredFlag = None,
    most_loss: MostLossFlag = 0.01,
    json: JsonFlag = None,
) -> None:
    """Sweep every prefill:decode ratio over your traffic; the best one, how sure that is, and what it costs."""
    from baton.planner.budget import Budget, of_widths, require_runnable, spend
    from baton.planner.costs.speculation import with_acceptance
    from baton.planner.costs.worker import with_adapters, worker_costs
    from baton.planner.plan import plan
    from baton.planner.score import Slo
    from baton.planner.simulator.cluster import ClusterScenario, SimSettings
    from baton.planner.sweep import sweep

    def run() -> int:
        slo, limits = Slo(ttft, tpot), _classes(classes)
        require_place(json, plot, helm)
        facts = require_allowed([name for name in (profile, decode_profile) if name], measured, most_loss)
        budget, profiles = Budget(workers, accelerators, dollars, watts, price), of_widths(profile, _widths(widths))
        if decode_profile and not budget.workers:
            raise ConfigError("with a decode profile of its own the budget is --workers", "decode_profile")
        if helm and hypothetical:
            raise ConfigError("--helm writes values for Baton's engine: leave --hypothetical out", "helm")
        writes = worker_costs(decode_profile) if decode_profile else None
        if writes and not hypothetical:
            require_runnable(writes)
        part, chances = load(trace, speed, start, seconds, skip_bad=False), acceptance_from(acceptance)
        told = Console(stderr=True, highlight=False)

        def planned(reads: WorkerCosts, count: int) -> Plan:
            settings = SimSettings(0, count, policy=policy, seed=seed)
            share, both = part.adapted_share, writes or reads
            costs, written = with_adapters(reads, share, adapter_cost), with_adapters(both, share, adapter_cost)
            scenario = ClusterScenario(settings, costs, with_acceptance(written, chances), part)
            found, flights = sweep(
                count, scenario, slo, window,
                lambda r: told.print(f"{r.name}: {r.score.attainment:.1%} meet the SLOs", style="dim"),
            )  # fmt: skip
            return plan(found, flights, scenario, slo, want, limits, price)

        answer, tried = spend(budget, profiles, planned, hypothetical)
        if plot:
            from baton.planner.plot import draw

            draw(answer, plot)
        if helm:
            write_file(helm, answer.helm.encode())
        if not write_json(json, msgspec.to_builtins(answer) | {"tried": msgspec.to_builtins(tried)}):
            _show(answer)
            for fact in facts:
                Console(highlight=False).print(fact)
            if len(tried) > 1:
                _show_tried(tried)
        return 0

    raise typer.Exit(guarded(run))


def _classes(text: str) -> dict[str, int]:
    try:
        return {name: int(most) for name, most in (item.split("=") for item in text.split(","))}
    except ValueError as error:
        raise ConfigError(f"--classes {text!r}: write name=tokens,name=tokens", "classes") from error


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
    Console(highlight=False).print(table)


def _show(answer: Plan) -> None:
    out, found = Console(highlight=False), answer.sweep
    table = Table("ratio", "SLOs met", "TTFT s", "p99", "TPOT ms", "P steps", "D steps", "hits")
    for r in (*found.ratios, found.colocated):
        s = r.score
        low, high = found.plateau
        mark = "bold" if r == answer.chosen else ("green" if r.prefill and low <= r.prefill <= high else None)
        table.add_row(
            r.name, f"{s.attainment:.1%}", f"{s.ttft.mean:.2f}", f"{s.ttft.p99:.2f}", f"{s.tpot.mean * 1e3:.1f}",
            f"{r.prefill_busy:.0%}", f"{r.decode_busy:.0%}", f"{r.hit_rate:.0%}", style=mark,
        )  # fmt: skip
    out.print(table)
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
    out.print(answer.helm, end="", markup=False)


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"${value:.2f}"
