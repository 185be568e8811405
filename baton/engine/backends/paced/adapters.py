"""Holds the ids of adapters for an engine without weights, whose first row of KV depends on the id.

Knows nothing of pages. A sequence with another adapter, or with other content under the same name, has other
rows, so that KV of the wrong adapter gives a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.part_table import rows_of
from baton.protos.errors import AdapterNotLoaded


class PacedAdapters(AdapterHost):
    """Implements ``AdapterHost`` for adapters of any modules; only ranks and sizes are limited."""

    def __init__(self, max_rank: int, max_bytes: int) -> None:
        self.base = AdapterBase({}, max_rank, max_bytes)
        self._ranks: dict[str, int] = {}

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Lets sequences name ``adapter``; its matrices are not used."""
        self._ranks[adapter] = int(rows_of(packed.parts)["rank"].max(initial=0))
        yield from ()

    def drop(self, adapter: str) -> None:
        """Removes an adapter that no sequence names any more."""
        self._ranks.pop(adapter, None)

    def require(self, adapter: str) -> None:
        """Raises AdapterNotLoaded unless ``adapter`` is empty or held."""
        if adapter and adapter not in self._ranks:
            raise AdapterNotLoaded(f"adapter {adapter!r} is not loaded here", "adapter_id")

    def rank_of(self, adapter: str) -> int:
        """Returns the largest rank of the matrices of ``adapter``, which is held."""
        return self._ranks[adapter]
