"""Whether a model can be served, asked before anything is started. Knows nothing of processes or weights."""

from __future__ import annotations

from pathlib import Path

from baton.cluster.config import BatonConfig
from baton.cluster.served_model import is_paced, resolve_model
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.ranks import require_splittable
from baton.launch.plans import config_of, slots_of
from baton.protos.errors import ConfigError


def servable_model(config: BatonConfig) -> str:
    """Returns the directory or hub id to serve; empty for a paced engine without one.

    Raises CheckpointError, also for a directory whose config.json no engine can read or knows the architecture of,
    and ConfigError for a number of ranks that the model can't be split among.
    """
    model = resolve_model(config)
    widths = {count for count in widths_of(config) if count > 1}
    if widths and config.worker.device != "cpu":
        text = f"tp is {max(widths)}: several ranks run on the cpu only, worker.device is {config.worker.device}"
        raise ConfigError(text, "tp")
    if not is_paced(config) and Path(model).is_dir():
        program = program_for(ModelConfig.read(Path(model)))
        for count in sorted(widths):
            require_splittable(program, count)
    return model


def widths_of(config: BatonConfig) -> set[int]:
    """Returns the numbers of ranks that the cluster's workers have."""
    own = {config_of(config, slot, role).worker.tp for slot, role in slots_of(config)}
    return own or {config.worker.tp}
