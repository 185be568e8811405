"""Describes the requirements of a base model on adapters. Knows nothing of files or of memory."""

from __future__ import annotations

import msgspec

from baton.engine.program.sites import Site, StackedSite


class AdapterBase(msgspec.Struct, frozen=True):
    """The requirements that an adapter has to meet: the base model's layers, largest rank and size.

    An engine without weights has no ``sites`` and accepts modules of any name and size.
    """

    sites: dict[str, Site]  # adaptable layers, by module name
    max_rank: int
    max_bytes: int  # of an adapter's packed matrices
    narrow: bool = False  # matrices are stored as bf16
    stacked: dict[str, StackedSite] = {}  # parameters that hold all experts of a layer, by name
    idle: tuple[str, ...] = ()  # modules that have no effect, so that an adapter's matrices beside them are skipped
    others: tuple[str, ...] = ()  # modules of the base that adapters don't go to
    model: str = ""  # folder of the base's checkpoint, with whose tables an adapter's copies of them are compared
