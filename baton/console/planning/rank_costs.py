"""Finds the numbers of ranks that a model runs on, and measures the costs of splitting it over them for a profile.

Knows nothing of how a curve is measured.
"""

from __future__ import annotations

from pathlib import Path

from baton.bench.meetings import measured_meeting
from baton.cluster.config import BatonConfig
from baton.cluster.sections.cluster import role_worker
from baton.cluster.served_model import is_paced, resolve_model
from baton.cost.profiles import RankCosts
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Exchange, Meet
from baton.engine.program.program import Program
from baton.engine.program.shares import Widths
from baton.launch.plans import ranks_of
from baton.protos.errors import CheckpointError

MOST = 16  # ranks that a profile speaks of


def rank_costs_of(config: BatonConfig) -> RankCosts | None:
    """Returns the rank costs of the cluster's decode workers, measured on this machine; None if their model can't
    be split.
    """
    worker, model = role_worker(config.worker, config.cluster, "decode"), Path(resolve_model(config))
    if is_paced(config) or worker.device != "cpu" or not model.is_dir():
        return None
    found = costs_of(program_for(ModelConfig.read(model)), ranks_of(worker), 0.0)
    seconds = measured_meeting() if found is not None else None
    if found is None or seconds is None:
        return None
    return RankCosts(found.shared, found.count, found.widths, found.meetings, seconds)


def costs_of(program: Program, widths: Widths, meeting_s: float) -> RankCosts | None:
    """Returns the rank costs of ``program``, ``meeting_s`` seconds per exchange between ranks; None if it runs on
    one rank only.
    """
    if widths.tp > 1 and widths.pp > 1:
        return None
    possible = widths.possible(program, MOST)
    if len(possible) == 1:
        return None
    several = Widths(**{widths.field: possible[1]}).share(program, 0)
    meetings = sum(isinstance(op, Exchange | Meet) for op in several.program.ops) + 1  # the last: for logits
    field = widths.field
    return RankCosts(field, widths.count, possible, meetings, meeting_s)  # type: ignore[arg-type]  # tp, cp, pp or ep


def runnable_widths(model: str) -> str:
    """Returns in words on how many ranks of a CPU the model runs in each way, or why no engine reads it.

    Empty where ``model`` is no folder with a config.json, nor that file.
    """
    folder = Path(model).parent if Path(model).name == "config.json" else Path(model)
    if not (folder / "config.json").is_file():
        return ""
    try:
        program = program_for(ModelConfig.read(folder))
    except CheckpointError as error:
        return f"none, {error}"
    most = {field: Widths(**{field: 2}).possible(program)[-1] for field in Widths.__struct_fields__}
    return ", ".join(f"{field} {f'1 to {count}' if count > 1 else 1}" for field, count in most.items())
