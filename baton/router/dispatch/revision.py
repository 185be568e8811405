"""The count of changes to the cluster as a router sees it. Knows nothing of what changed or who asks."""

from __future__ import annotations

from collections.abc import Callable


class ClusterRevision:
    """Rises with every change; ``on_change`` is called each time, because room for a request may have appeared."""

    __slots__ = ("_on_change", "number")

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change
        self.number = 0

    def advance(self) -> None:
        """Counts a change and tells of it."""
        self.number += 1
        self._on_change()
