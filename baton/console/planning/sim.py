"""`baton sim`: simulates a cluster over a trace, or validates the simulator against a recorded run.

Knows nothing of how it is simulated; it reads flags and prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.output import guarded, write_json
from baton.console.planning import plan

app = typer.Typer(help="Simulate a cluster over a trace, or check the simulator against a recorded run.")
Json = Annotated[str | None, typer.Option("--json", help="Write the result there; - prints it instead of a table")]


@app.callback(invoke_without_command=True)
def sim_command(
    context: typer.Context,
    trace: Annotated[str | None, typer.Option(help="A .jsonl (Mooncake) or .csv (Azure) file")] = None,
    profile: Annotated[
        str | None, typer.Option(help="roofline:MODEL@GPUxN, a folder of operator timings, or a paced profile")
    ] = None,
    decode_profile: Annotated[str | None, typer.Option(help="Of decode workers, if another")] = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 0: colocated")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers")] = 1,
    policy: plan.PolicyFlag = "cost",
    ttft: plan.TtftFlag = 10.0,
    tpot: plan.TpotFlag = 0.1,
    speed: plan.SpeedFlag = 1.0,
    start: plan.FromFlag = 0.0,
    seconds: plan.SecondsFlag = 0.0,
    stepwise: Annotated[
        bool, typer.Option("--stepwise", help="Compress nothing: blocks of 16, the real decode scheduler")
    ] = False,
    fail: Annotated[
        list[str] | None, typer.Option(help="WORKER@FROM:UNTIL in seconds: it dies and comes back; again for more")
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(help="NAME:ROLE:COUNT=PROFILE: more workers, unlike the others; again for more"),
    ] = None,
    adapter_cost: plan.AdapterCostFlag = 1.0,
    measured: plan.MeasuredFlag = None,
    most_loss: plan.MostLossFlag = 0.01,
    acceptance: plan.AcceptanceFlag = "",
    seed: plan.SeedFlag = 0,
    json: Json = None,
) -> None:
    """Simulate a cluster over a trace."""
    if context.invoked_subcommand is not None:
        return
    if trace is None or profile is None:
        raise typer.BadParameter("--trace and --profile are needed; or use `baton sim validate`")
    raise typer.Exit(
        guarded(
            lambda: _allowed([profile, decode_profile, *map(_profile_of, pool or [])], measured, most_loss, json)
            or plan.simulate_command(
                trace, profile, decode_profile, json, (ttft, tpot), (speed, start, seconds), pool or [], fail or [],
                prefill=prefill, decode=decode, policy=policy, stepwise=stepwise, seed=seed,
                adapter_cost=adapter_cost, acceptance=acceptance,
            )
        )
    )  # fmt: skip


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
    Console().print(table)
    return 0


def _profile_of(pool: str) -> str:
    """Returns the profile that a ``--pool`` names; the parser of pools refuses a malformed one."""
    return pool.partition("=")[2]


def _allowed(profiles: Sequence[str | None], measured: str | None, most_loss: float, json: str | None) -> int:
    """0, so that the simulation follows, with what was measured of its forms said first."""
    facts = plan.require_allowed([name for name in profiles if name], measured, most_loss)
    for fact in () if json else facts:
        Console(highlight=False).print(fact)
    return 0


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"
