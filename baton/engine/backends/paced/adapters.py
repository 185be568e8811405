"""Holds the ids of adapters for an engine without weights, whose first row of KV depends on the id.

Knows nothing of pages. A sequence with another adapter, or with other content under the same name, has other
rows, so that KV of the wrong adapter gives a wrong token.
"""

from __future__ import annotations

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter
from baton.protos.errors import AdapterNotLoaded


class PacedAdapters:
    """Implements ``AdapterHost`` for adapters of any modules; only ranks and sizes are limited."""

    def __init__(self, max_rank: int, max_bytes: int) -> None:
        self.base = AdapterBase({}, max_rank, max_bytes)
        self._held: set[str] = set()

    def hold(self, adapter: str, packed: PackedAdapter) -> None:
        """Lets sequences name ``adapter``; its matrices are not used."""
        self._held.add(adapter)

    def drop(self, adapter: str) -> None:
        """Removes an adapter that no sequence names any more."""
        self._held.discard(adapter)

    def require(self, adapter: str) -> None:
        """Raises AdapterNotLoaded unless ``adapter`` is empty or held."""
        if adapter and adapter not in self._held:
            raise AdapterNotLoaded(f"adapter {adapter!r} is not loaded here", "adapter_id")
