"""Whether a model can be served, asked before anything is started. Knows nothing of processes or weights."""

from __future__ import annotations

from pathlib import Path

from baton.cluster.config import BatonConfig
from baton.cluster.served_model import is_paced, resolve_model
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig


def servable_model(config: BatonConfig) -> str:
    """Returns the directory or hub id to serve; empty for a paced engine without one.

    Raises CheckpointError, also for a directory whose config.json no engine can read or knows the architecture of.
    """
    model = resolve_model(config)
    if not is_paced(config) and Path(model).is_dir():
        program_for(ModelConfig.read(Path(model)))
    return model
