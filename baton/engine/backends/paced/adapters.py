"""Holds adapters for an engine without weights: their ids alone, which its first row is made of.

Knows nothing of pages. A sequence on another adapter, or on another content of the same name, has other rows, so
that KV that met the wrong adapter gives a wrong token.
"""

from __future__ import annotations

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter
from baton.protos.errors import AdapterNotLoaded


class PacedAdapters:
    """Implements ``AdapterHost`` over any modules; only ranks and sizes are bounded."""

    def __init__(self, max_rank: int, max_bytes: int) -> None:
        self.base = AdapterBase({}, max_rank, max_bytes)
        self._held: set[str] = set()

    def hold(self, adapter: str, packed: PackedAdapter) -> None:
        """Applies the adapter to sequences that name it."""
        self._held.add(adapter)

    def drop(self, adapter: str) -> None:
        """Forgets an adapter that no sequence names any more."""
        self._held.discard(adapter)

    def require(self, adapter: str) -> None:
        """Raises AdapterNotLoaded where ``adapter`` is named and isn't held."""
        if adapter and adapter not in self._held:
            raise AdapterNotLoaded(f"adapter {adapter!r} is not loaded here", "adapter_id")
