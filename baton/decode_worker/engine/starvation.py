"""Judges whether a pool that is full can still come to have a free page.

Knows nothing of schedulers or of which sequence waits.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.steps.sharing import PageSharing
from baton.kv.pages.pool import PagePool

SHARED_S = 10.0  # seconds that a sequence without a page waits for pages that the I/O process reads or fills


class Starvation:
    """Follows how long sequences have waited for a page; ``clear`` ends a wait. ``clock`` returns seconds."""

    def __init__(self, pool: PagePool, sharing: PageSharing, clock: Callable[[], float]) -> None:
        self._pool, self._sharing, self._clock = pool, sharing, clock
        self._since: float | None = None

    def clear(self) -> None:
        """Forgets the present wait, because a step ran or a sequence was given up."""
        self._since = None

    def is_hopeless(self) -> bool:
        """Returns whether no page is quarantined, and none that the I/O process holds came back within SHARED_S."""
        return not self._pool.snapshot_counts().quarantined and not self._shares_may_end()

    def _shares_may_end(self) -> bool:
        if not len(self._sharing):
            return False
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since < SHARED_S
