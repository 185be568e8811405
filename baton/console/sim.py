"""`baton sim`: what a cluster would do with a trace, and how well the simulator gives a recorded run back.

Knows nothing of how it is simulated; it reads flags and prints.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.output import guarded, write_json

app = typer.Typer(no_args_is_help=True, help="Simulate a cluster over a trace, or check the simulator.")
Json = Annotated[str | None, typer.Option("--json", help="Write the result there; - prints it instead of a table")]


@app.command("validate")
def validate_command(
    run: Annotated[str, typer.Option(help="Folder of a recorded vLLM run: requests.jsonl, meta.json, config.json")],
    profile: Annotated[str, typer.Option(help="Folder of operator timings of the same hardware and model")],
    json: Json = None,
) -> None:
    """Simulate a recorded run from operator timings; print observed, simulated and error."""
    raise typer.Exit(guarded(lambda: _validate(run, profile, json)))


def _validate(run: str, profile: str, json: str | None) -> int:
    from baton.planner.operators import load_operators
    from baton.planner.validate import validate
    from baton.planner.vllm_run import load_run

    recorded = load_run(run)
    found = validate(recorded, load_operators(profile, recorded.tp, recorded.link))
    if write_json(json, msgspec.to_builtins(found)):
        return 0
    table = Table(title=f"{found.model}: {found.requests} requests, {found.preemptions} preemptions simulated")
    for name in ("metric", "figure", "observed", "simulated", "error"):
        table.add_column(name, justify="left" if name in ("metric", "figure") else "right")
    for row in found.rows:
        for figure, error in row.error.items():
            seen, said = getattr(row.observed, figure), getattr(row.simulated, figure)
            table.add_row(row.metric, figure, _time(seen), _time(said), "-" if error is None else f"{error:+.1%}")
    Console().print(table)
    return 0


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"
