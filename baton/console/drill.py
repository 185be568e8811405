"""``baton drill``: simulated clusters with faults, one per seed; a failing one is reduced to a minimal scenario and
printed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from baton.console.drill_live import LivePlan, judge_live
from baton.console.option_groups import with_groups
from baton.console.output import guarded
from baton.drill.draw import draw
from baton.drill.scenario import FAULTS, FaultKind, Scenario, Size
from baton.protos.errors import ConfigError

MOST_WEIGHT = 100  # of a fault's kind


@dataclass(frozen=True)
class SeedOptions:
    """Says which seeds are run, and for how long."""

    seeds: Annotated[int | None, typer.Option(help="How many seeds to run", min=1)] = None
    first: Annotated[int, typer.Option(help="The first seed")] = 0
    seed: Annotated[int | None, typer.Option(help="Run this seed alone")] = None
    trace: Annotated[bool, typer.Option("--trace", help="Print the story of the seed")] = False
    minutes: Annotated[float | None, typer.Option(help="Run seeds for so long", min=0.0)] = None


@dataclass(frozen=True)
class SizeOptions:
    """Bounds the clusters that are drawn from seeds, and the cores on which they run."""

    faults: Annotated[str, typer.Option(help=f"Kinds of faults, weighed as in kill:3, of {', '.join(FAULTS)}")] = (
        ",".join(FAULTS)
    )
    most_faults: Annotated[int, typer.Option(help="Faults per run at most", min=0)] = 6
    requests: Annotated[int, typer.Option(help="Requests per run at most", min=1)] = 40
    workers: Annotated[int, typer.Option(help="Workers per role at most", min=1)] = 4
    cores: Annotated[int, typer.Option(help="Processes; 0: one per core", min=0)] = 0


@dataclass(frozen=True)
class ReplayOptions:
    """Says which runs are repeated: a scenario, each seed twice, or failures made small."""

    scenario: Annotated[Path | None, typer.Option(help="Replay a scenario that was printed (JSON)")] = None
    twice: Annotated[bool, typer.Option("--twice", help="Play each seed twice; the stories must not differ")] = (
        False
    )
    make_small: Annotated[bool, typer.Option("--shrink/--no-shrink", help="Make what fails small")] = True


@dataclass(frozen=True)
class LiveOptions:
    """Names a running server, to be judged in place of simulated clusters."""

    live: Annotated[str, typer.Option(help="Judge the running server at this URL instead, by its answers")] = ""
    key: Annotated[str, typer.Option(help="The key that --live sends", envvar="BATON_API_KEY")] = ""
    model: Annotated[str, typer.Option(help="The model that --live asks; the first served by default")] = ""
    kill: Annotated[str, typer.Option(help="Processes of it that --live kills under load, by pid: 123,456")] = ""


@with_groups
def drill_command(
    asked: SeedOptions,
    bounds: SizeOptions,
    replay: ReplayOptions,
    server: LiveOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Plays simulated clusters with faults and holds every answer and every resource against what must be."""

    def run() -> int:
        if server.live:
            seed = asked.first if asked.seed is None else asked.seed
            load = LivePlan(questions=bounds.requests, seed=seed, pids=_pids(server.kill))
            return judge_live(server.live, server.key, server.model, load, as_json)
        return _simulate(asked, bounds, replay, as_json)

    raise typer.Exit(guarded(run))


def _simulate(asked: SeedOptions, bounds: SizeOptions, replay: ReplayOptions, as_json: bool) -> int:
    from baton.console.drill_runs import (  # the whole router: `baton` starts twice as fast without
        run_scenario,
        run_seeds,
    )

    size = Size(bounds.workers, bounds.requests, bounds.most_faults, kinds=_kinds(bounds.faults))
    if asked.seed is not None or replay.scenario is not None:
        chosen = draw(asked.seed or 0, size) if replay.scenario is None else _read(replay.scenario)
        return run_scenario(chosen, asked.trace, replay.twice, as_json, replay.make_small)
    count = None if asked.minutes is not None and asked.seeds is None else asked.seeds or 1000
    limit = None if asked.minutes is None else asked.minutes * 60
    cores = bounds.cores or os.cpu_count() or 1
    return run_seeds(asked.first, count, limit, size, cores, replay.twice, as_json, replay.make_small)


def _kinds(text: str) -> tuple[FaultKind, ...]:
    """Returns the kinds of faults that ``text`` lists, each as often as its weight says: "kill:3,cut"."""
    weights: dict[str, int] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, _, weight = part.partition(":")
        if name not in FAULTS:
            raise ConfigError(f"--faults {name!r} is unknown; choose of {', '.join(FAULTS)}", "faults")
        if weight and not (weight.isdecimal() and 1 <= int(weight) <= MOST_WEIGHT):
            raise ConfigError(f"--faults {part!r}: write a weight of 1 to {MOST_WEIGHT}, as {name}:3", "faults")
        weights[name] = int(weight or 1)
    return tuple(kind for kind in FAULTS for _ in range(weights.get(kind, 0)))


def _pids(text: str) -> tuple[int, ...]:
    """Returns the pids that ``text`` lists; none of them may be this process or all of them (0, 1, negative)."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) <= 1 or int(part) == os.getpid():
            raise ConfigError(f"--kill {part!r} is no process to kill; write pids as 123,456", "kill")
        _require_killable(int(part))
    return tuple(map(int, parts))


def _require_killable(pid: int) -> None:
    """Raises ConfigError unless ``pid`` may be killed, if there is such a process."""
    try:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
    except (PermissionError, OverflowError) as error:
        raise ConfigError(f"--kill {pid} can't be done: {error}", "kill") from None


def _read(path: Path) -> Scenario:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scenario)
    except OSError as error:
        raise ConfigError(f"--scenario {path}: {error.strerror}", "scenario") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--scenario {path} is no scenario of this build: {error}", "scenario") from None
