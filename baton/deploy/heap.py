"""A process' heap, as it begins to serve. Knows nothing of who serves what.

A full garbage collection walks every object there is: of a router some 100,000, mostly modules and schemas. That
takes 60 to 90 ms of its one thread, in which nobody gets a token. What was made before the first request lives as
long as the process: no later collection needs to look at it.
"""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Collect once; later collections look at what comes after only."""
    gc.collect()
    gc.freeze()
