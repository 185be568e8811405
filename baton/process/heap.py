"""A process' heap, as it begins to serve. Knows nothing of who serves what.

A full garbage collection walks every object there is: of a router some 100,000, mostly modules and schemas. That
takes 60 to 90 ms of its one thread, in which nobody gets a token. What was made before the first request lives as
long as the process: no later collection needs to look at it.

What requests make is freed as they end, without a collection: answers leave no cycles. But a hundred objects of
each live for a moment, and by Python's default of 700 a collection would walk them every few requests, for nothing.
"""

from __future__ import annotations

import gc

YOUNG = 5000  # more objects made than freed, and it is looked whether some of them are cycles; that takes 2 ms


def settle_heap() -> None:
    """Collects garbage once; later collections look only at what comes after, each time it is YOUNG objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
