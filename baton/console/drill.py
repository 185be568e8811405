"""``baton drill``: simulated clusters with faults, one per seed; a failing one is reduced to a minimal scenario and
printed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from baton.console.drill_live import LivePlan, judge_live
from baton.console.output import guarded
from baton.drill.scenario import FAULTS, FaultKind, Scenario, Size, draw
from baton.protos.errors import ConfigError


def drill_command(
    seeds: Annotated[int | None, typer.Option(help="How many seeds to run", min=1)] = None,
    first: Annotated[int, typer.Option(help="The first seed")] = 0,
    seed: Annotated[int | None, typer.Option(help="Run this seed alone")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print the story of the seed")] = False,
    minutes: Annotated[float | None, typer.Option(help="Run seeds for so long", min=0.0)] = None,
    faults: Annotated[str, typer.Option(help=f"Kinds of faults, of {', '.join(FAULTS)}")] = ",".join(FAULTS),
    most_faults: Annotated[int, typer.Option(help="Faults per run at most", min=0)] = 6,
    requests: Annotated[int, typer.Option(help="Requests per run at most", min=1)] = 40,
    workers: Annotated[int, typer.Option(help="Workers per role at most", min=1)] = 4,
    cores: Annotated[int, typer.Option(help="Processes; 0: one per core", min=0)] = 0,
    scenario: Annotated[Path | None, typer.Option(help="Replay a scenario that was printed (JSON)")] = None,
    twice: Annotated[
        bool, typer.Option("--twice", help="Play each seed twice; the stories must not differ")
    ] = False,
    make_small: Annotated[bool, typer.Option("--shrink/--no-shrink", help="Make what fails small")] = True,
    live: Annotated[str, typer.Option(help="Judge the running server at this URL instead, by its answers")] = "",
    key: Annotated[str, typer.Option(help="The key that --live sends", envvar="BATON_API_KEY")] = "",
    model: Annotated[str, typer.Option(help="The model that --live asks; the first served by default")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Plays simulated clusters with faults and holds every answer and every resource against what must be."""

    def run() -> int:
        if live:
            asked = LivePlan(questions=requests, seed=first if seed is None else seed)
            return judge_live(live, key, model, asked, as_json)
        from baton.console.drill_runs import (  # the whole router: `baton` starts twice as fast without
            run_scenario,
            run_seeds,
        )

        size = Size(workers, requests, most_faults, kinds=_kinds(faults))
        if seed is not None or scenario is not None:
            chosen = draw(seed or 0, size) if scenario is None else _read(scenario)
            return run_scenario(chosen, trace, twice, as_json, make_small)
        count = None if minutes is not None and seeds is None else seeds or 1000
        limit = None if minutes is None else minutes * 60
        return run_seeds(first, count, limit, size, cores or os.cpu_count() or 1, twice, as_json, make_small)

    raise typer.Exit(guarded(run))


def _kinds(text: str) -> tuple[FaultKind, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"--faults {name!r} is unknown; choose of {', '.join(FAULTS)}", "faults")
    return tuple(kind for kind in FAULTS if kind in names)


def _read(path: Path) -> Scenario:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scenario)
    except OSError as error:
        raise ConfigError(f"--scenario {path}: {error.strerror}", "scenario") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--scenario {path} is no scenario of this build: {error}", "scenario") from None
