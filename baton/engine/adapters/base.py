"""Says what an adapter must fit. Knows nothing of files or of memory."""

from __future__ import annotations

import msgspec

from baton.engine.program.sites import Site


class AdapterBase(msgspec.Struct, frozen=True):
    """Says what an adapter must fit: the model's sites, the largest rank and size; ``narrow``: packed as bf16.

    An engine without weights has no sites, and takes modules of any name and size. ``model`` is the base's
    checkpoint, with whose tables copies of them are compared.
    """

    sites: dict[str, Site]
    max_rank: int
    max_bytes: int
    narrow: bool = False
    model: str = ""
