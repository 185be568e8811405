"""Whether a model can be served, asked before anything is started. Knows nothing of processes or weights."""

from __future__ import annotations

from pathlib import Path

from baton.cluster.config import BatonConfig
from baton.cluster.served_model import is_paced, resolve_model
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.shares import Widths
from baton.gguf_files.folder import folder_of, is_gguf
from baton.launch.plans import config_of, slots_of
from baton.protos.errors import ConfigError


def servable_model(config: BatonConfig) -> str:
    """Returns the directory or hub id to serve; empty for a paced engine without one.

    Raises CheckpointError, also for a directory whose config.json no engine can read or knows the architecture of,
    and ConfigError for a number of ranks that the model can't be split among.
    """
    model = resolve_model(config)
    several = [widths for widths in widths_of(config) if widths.count > 1]
    for widths in several:
        widths.require_one_kind()
    if several and config.worker.device != "cpu":
        first = several[0]
        text = f"{first}: several ranks run on the cpu only, worker.device is {config.worker.device}"
        raise ConfigError(text, first.field)
    local = folder_of(model) if is_gguf(model) and Path(model).is_file() else Path(model)
    if not is_paced(config) and local.is_dir():
        program = program_for(ModelConfig.read(local))
        for widths in several:
            widths.require(program)
    return model


def widths_of(config: BatonConfig) -> list[Widths]:
    """Returns the ranks that the cluster's workers have, each kind once, in order."""
    workers = [config_of(config, slot, role).worker for slot, role in slots_of(config)] or [config.worker]
    found = {Widths(worker.tp, worker.cp, worker.pp) for worker in workers}
    return sorted(found, key=lambda widths: (widths.tp, widths.cp, widths.pp))
