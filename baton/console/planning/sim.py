"""`baton sim`: simulates a cluster over a trace, or validates the simulator against a recorded run.

Knows nothing of how it is simulated; it reads flags and prints.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from baton.console.option_groups import with_groups
from baton.console.output import guarded, print_table, results, write_json
from baton.console.planning.options import (
    AcceptanceFlag,
    AdapterCostFlag,
    MaxBatchFlag,
    MeasuredOptions,
    PartOptions,
    PolicyFlag,
    SeedFlag,
    SloOptions,
    acceptance_from,
    adapter_costs_from,
)
from baton.process.output_files import require_place

if TYPE_CHECKING:  # loaded by the command that needs them
    from baton.planner.sweep import RatioOutcome

app = typer.Typer(help="Simulate a cluster over a trace, or check the simulator against a recorded run.")
Json = Annotated[str | None, typer.Option("--json", help="Write the result there; - prints it instead of a table")]


@dataclass(frozen=True)
class ClusterOptions:
    """Describes the cluster, and names the trace that it serves."""

    trace: Annotated[str | None, typer.Option(help="A .jsonl (Mooncake) or .csv (Azure) file")] = None
    profile: Annotated[
        str | None, typer.Option(help="roofline:MODEL@GPUxN, a folder of operator timings, or a paced profile")
    ] = None
    decode_profile: Annotated[str | None, typer.Option(help="Of decode workers, if another")] = None
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 0: colocated")] = 1
    decode: Annotated[int, typer.Option(min=1, help="Decode workers")] = 1
    policy: PolicyFlag = "cost"
    max_batch: MaxBatchFlag = 128


@dataclass(frozen=True)
class WorldOptions:
    """Adds failures, other workers and adapters to a cluster of equal workers."""

    stepwise: Annotated[
        bool, typer.Option("--stepwise", help="Compress nothing: blocks of 16, the real decode scheduler")
    ] = False
    fail: Annotated[
        list[str] | None, typer.Option(help="WORKER@FROM:UNTIL in seconds: it dies and comes back; again for more")
    ] = None
    pool: Annotated[
        list[str] | None,
        typer.Option(help="NAME:ROLE:COUNT=PROFILE: more workers, unlike the others; again for more"),
    ] = None
    adapter_cost: AdapterCostFlag = ""


@dataclass(frozen=True)
class ChanceOptions:
    """Holds the acceptance of drafts, and the seed."""

    acceptance: AcceptanceFlag = ""
    seed: SeedFlag = 0


@app.callback(invoke_without_command=True)
@with_groups
def sim_command(
    context: typer.Context,
    cluster: ClusterOptions,
    slo: SloOptions,
    part: PartOptions,
    world: WorldOptions,
    measured: MeasuredOptions,
    chance: ChanceOptions,
    json: Json = None,
) -> None:
    """Simulate a cluster over a trace."""
    if context.invoked_subcommand is not None:
        return
    if cluster.trace is None or cluster.profile is None:
        raise typer.BadParameter("--trace and --profile are needed; or use `baton sim validate`")

    def run() -> int:
        require_place(json)
        named = [cluster.profile, cluster.decode_profile, *map(_profile_of, world.pool or [])]
        facts = measured.require_allowed([name for name in named if name])
        for fact in () if json else facts:
            results().print(fact)
        return _simulate(cluster, slo, part, world, chance, json)

    raise typer.Exit(guarded(run))


def _simulate(
    cluster: ClusterOptions, slo: SloOptions, part: PartOptions, world: WorldOptions, chance: ChanceOptions,
    json: str | None,
) -> int:  # fmt: skip
    """Simulates one ratio over a trace and prints the outcome; returns 0."""
    from baton.planner.costs.speculation import with_acceptance
    from baton.planner.costs.worker import worker_costs
    from baton.planner.simulator.cluster import ClusterScenario, SimSettings
    from baton.planner.simulator.faults import parse_failure, parse_pool
    from baton.planner.sweep import simulate

    assert cluster.trace is not None
    assert cluster.profile is not None
    settings = SimSettings(
        prefill=cluster.prefill, decode=cluster.decode, policy=cluster.policy, max_batch=cluster.max_batch,
        stepwise=world.stepwise, seed=chance.seed,
    )  # fmt: skip
    load, adapters = part.read(cluster.trace), adapter_costs_from(world.adapter_cost)
    reads = worker_costs(cluster.profile, settings.prefill_chunk)
    writes = worker_costs(cluster.decode_profile, settings.prefill_chunk) if cluster.decode_profile else reads
    settings = settings.with_chunks_of(reads, writes)
    costs, chances = adapters.on(reads, load.adapter_shares, "prefill"), acceptance_from(chance.acceptance)
    decode = with_acceptance(adapters.on(writes, load.adapter_shares, "decode"), chances)
    began = time.process_time()
    parsed = [parse_pool(text, settings.prefill_chunk) for text in world.pool or ()]
    pools = [
        msgspec.structs.replace(
            p, costs=with_acceptance(adapters.on(p.costs, load.adapter_shares, p.role), chances)
        )
        for p in parsed
    ]
    deaths = [parse_failure(text) for text in world.fail or ()]
    found = simulate(ClusterScenario(settings, costs, decode, load, pools, deaths), slo.slo)
    took = time.process_time() - began
    about = adapters.about(load.adapter_shares, reads, writes)
    result = {"trace": load.source, "profile": costs.about, "acceptance": chances, "cpu_seconds": took}
    if not write_json(json, result | {"adapters": about, "result": msgspec.to_builtins(found)}):
        if load.adapter_shares or world.adapter_cost:
            results().print(about)
        _show(found, costs.about, found.score.requests / took)
    return 0


def _show(found: RatioOutcome, about: str, speed: float) -> None:
    from baton.planner.sweep import miss_reason

    out, s = results(), found.score
    out.print(f"{found.name}, {about}: {s.requests:,} requests, {speed:,.0f} simulated per CPU second")
    table = Table("", "mean", "median", "p90", "p99")
    for name, f, scale in (("TTFT s", s.ttft, 1.0), ("TPOT ms", s.tpot, 1e3), ("latency s", s.latency, 1.0)):
        table.add_row(name, *(f"{getattr(f, x) * scale:.2f}" for x in ("mean", "median", "p90", "p99")))
    print_table(table)
    out.print(f"every SLO met by {s.attainment:.1%} ({s.goodput:.2f}/s); {miss_reason(found)}")
    out.print(f"prefix hits {found.hit_rate:.1%} of prompt tokens")
    if found.deaths:
        out.print(f"{found.deaths} deaths: {found.moved} answers moved, {found.read_again} prompts read again")


@app.command("validate")
def validate_command(
    run: Annotated[str, typer.Option(help="Folder of a recorded vLLM run: requests.jsonl, meta.json, config.json")],
    profile: Annotated[str, typer.Option(help="Folder of operator timings of the same hardware and model")],
    model: Annotated[str | None, typer.Option(help="config.json of a model that isn't known by name")] = None,
    json: Json = None,
) -> None:
    """Simulate a recorded run from operator timings; print observed, simulated and error."""
    raise typer.Exit(guarded(lambda: _validate(run, profile, model, json)))


def _validate(run: str, profile: str, model: str | None, json: str | None) -> int:
    from baton.planner.costs.operators import load_operators
    from baton.planner.recorded.validate import validate
    from baton.planner.recorded.vllm_run import load_run

    recorded = load_run(run)
    found = validate(recorded, load_operators(profile, recorded.tp, recorded.link, model))
    if write_json(json, msgspec.to_builtins(found)):
        return 0
    without = f" ({found.left_out} without times left out)" if found.left_out else ""
    told = f"{found.model}: {found.requests} requests{without}, {found.preemptions} preemptions simulated"
    table = Table(title=told)
    for name in ("metric", "figure", "observed", "simulated", "error"):
        table.add_column(name, justify="left" if name in ("metric", "figure") else "right")
    for row in found.rows:
        for figure, error in row.error.items():
            seen, said = getattr(row.observed, figure), getattr(row.simulated, figure)
            table.add_row(row.metric, figure, _time(seen), _time(said), "-" if error is None else f"{error:+.1%}")
    print_table(table)
    return 0


def _profile_of(pool: str) -> str:
    """Returns the profile that a ``--pool`` names; the parser of pools refuses a malformed one."""
    return pool.partition("=")[2]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"
