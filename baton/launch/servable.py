"""Checks whether a model can be served, before anything is started.

Knows nothing of processes or weights.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.cluster.config import BatonConfig, WorkerConfig
from baton.cluster.served_model import is_paced, resolve_model
from baton.engine.config import require_context
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.shares import Widths
from baton.gguf_files.folder import folder_of, is_gguf
from baton.launch.plans import config_of, ranks_of, slots_of
from baton.protos.errors import ConfigError


def servable_model(config: BatonConfig) -> str:
    """Returns the directory or hub id of the model to serve; "" for a paced engine without a model.

    Raises CheckpointError, also if a directory's config.json is unreadable or of an unknown architecture, and
    ConfigError for a number of ranks among which the model can't be split, and a longer context than its own.
    """
    model = resolve_model(config)
    several = [(widths, device) for widths, device in widths_of(config) if widths.count > 1]
    for widths, device in several:
        widths.require_known()
        if device == "cuda":
            widths.require_on_cards()
        elif device != "cpu":
            text = f"{widths}: several ranks run on cpu or cuda, worker.device is {device}; name one of them"
            raise ConfigError(text, widths.field)
    local = folder_of(model) if is_gguf(model) and Path(model).is_file() else Path(model)
    if not is_paced(config) and local.is_dir():
        program = program_for(ModelConfig.read(local))
        for longest in {worker.max_model_len for worker in workers_of(config)}:
            require_context(longest, program.max_position)
        for widths, device in several:
            widths.require(program)
            if device == "cuda":
                widths.require_on_cards(program)
    return model


def workers_of(config: BatonConfig) -> list[WorkerConfig]:
    """Returns the settings of each of the cluster's workers, those of ``[worker]`` where it has none."""
    return [config_of(config, slot, role).worker for slot, role in slots_of(config)] or [config.worker]


def widths_of(config: BatonConfig) -> list[tuple[Widths, str]]:
    """Returns the different (ranks, device) pairs of the cluster's workers, sorted."""
    found = {(ranks_of(worker), worker.device) for worker in workers_of(config)}
    return sorted(found, key=lambda pair: (msgspec.structs.astuple(pair[0]), pair[1]))
