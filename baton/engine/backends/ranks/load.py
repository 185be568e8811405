"""Loads one rank's part of a model, for the lead and its followers alike.

Knows nothing of processes or of the memory that they share.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from baton.engine.backends.ranks.adapters import OwnAdapters
from baton.engine.backends.ranks.experts import OwnExpertLayers
from baton.engine.backends.ranks.hosts.layout import most_on_one
from baton.engine.backends.ranks.notes import AdapterNote, PagesNote, read
from baton.engine.backends.ranks.own_parts import any_copies
from baton.engine.backends.ranks.program import NativeRankProgram
from baton.engine.checkpoints.hub import locate
from baton.engine.checkpoints.weights import Weights, load_weights
from baton.engine.config import KV_NAMES, EngineConfig
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program
from baton.engine.program.rope import for_context
from baton.engine.program.sites import adaptable
from baton.kernels.abi import native
from baton.kv.layout.page import layout_for
from baton.kv.layout.tables import by_window
from baton.protos.errors import ConfigError


class LoadedRank(NamedTuple):
    """The model's whole program and one rank's share of it, with its weights. Of the lead, ``copies_parts`` says
    whether some rank copies a part of adapters' matrices.
    """

    program: Program
    native: NativeRankProgram
    weights: Weights
    fingerprint: str
    experts: OwnExpertLayers
    copies_parts: bool = False


def require_possible(config: EngineConfig, program: Program) -> None:
    """Raises ConfigError, naming the field and what works, unless ranks can run the model with this
    configuration.
    """
    widths = config.widths
    if native.library() is None:
        text = f"{widths}: ranks need the native CPU kernels: install a C++ compiler"
        raise ConfigError(text, widths.field)
    widths.require(program)
    if config.expert_replicas and not (program.experts and max(widths.tp, widths.ep) > 1):
        text = f"expert_replicas is {config.expert_replicas}, and {widths} divides no experts among ranks"
        raise ConfigError(f"{text}; set worker.ep, or worker.tp of a model with experts, or 0", "expert_replicas")


def rank_config(config: EngineConfig, cores: int) -> EngineConfig:
    """Returns ``config`` with the number of threads of one rank: those of a host share its configured threads, or
    else ``cores``.
    """
    return msgspec.structs.replace(config, threads=max(1, (config.threads or cores) // most_on_one(config)))


def load_rank(config: EngineConfig, index: int) -> LoadedRank:
    """Returns rank ``index``'s share of the model and its weights. Raises CheckpointError and ConfigError."""
    import torch  # here, so that only processes that compute import it

    directory = locate(config.model)
    model = ModelConfig.read(directory)
    planned = for_context(program_for(model), config.max_model_len)
    require_possible(config, planned)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    share = partial(config.widths.share, index=index, spare=config.expert_replicas)
    program, weights, fingerprint, rows_of = load_weights(config, directory, model, planned, dtype, share)
    whole = program if config.adapters is None else adaptable(program)
    own = share(whole)
    stored = KV_NAMES.get(config.kv_cache_dtype, "float32" if config.dtype == "auto" else config.dtype)
    layout = layout_for(stored, program.groups, states=program.states)
    layout = by_window(layout) if config.window_pages == "own" else layout
    compiled = NativeRankProgram(own, weights, layout)
    experts = OwnExpertLayers(compiled, program, rows_of if config.expert_replicas else None)
    copies = config.adapters is not None and not index and any_copies(whole, config.widths)
    return LoadedRank(program, compiled, weights, fingerprint, experts, copies)


class RankNotes:
    """Applies the lead's notes to one rank's share of the model; its adapters are in ``adapters``."""

    def __init__(self, loaded: LoadedRank, config: EngineConfig) -> None:
        self.adapters, self._experts = own_adapters(loaded, config), loaded.experts

    def take(self, fd: int, size: int) -> PagesNote | None:
        """Applies the note in the memory file ``fd`` of ``size`` bytes, and closes it; returns one about pages,
        which no rank's share of the model knows.
        """
        note, memory = read(fd, size)
        if isinstance(note, PagesNote):
            return note
        if isinstance(note, AdapterNote):
            self.adapters.take(note, memory)
        else:
            self._experts.place(note)
        return None


def own_adapters(loaded: LoadedRank, config: EngineConfig) -> OwnAdapters:
    """Returns the holder of a rank's share of adapters, with room for as many as may be loaded at once."""
    return OwnAdapters(loaded.native.own, numbers_of(config))


def numbers_of(config: EngineConfig) -> int:
    """Returns how many adapters need a number at once: one more than may be loaded, because one may replace
    another; 0 without adapters.
    """
    return 0 if config.adapters is None else config.adapters.max_loaded + 1
