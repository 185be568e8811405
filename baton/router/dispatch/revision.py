"""A counter of changes to the cluster as a router sees it, by which cached snapshots are invalidated."""

from __future__ import annotations

from collections.abc import Callable


class ClusterRevision:
    """Counts changes to the cluster in ``number``; ``on_change`` is called at each, because room for a request may
    have appeared.
    """

    __slots__ = ("_on_change", "number")

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change
        self.number = 0

    def advance(self) -> None:
        """Counts one change and calls ``on_change``."""
        self.number += 1
        self._on_change()
