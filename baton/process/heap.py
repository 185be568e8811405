"""The garbage collector's settings for a process that serves.

Knows nothing of who serves what. A full collection walks every object there is: in a router some 100,000, mostly
modules and schemas. That takes 60 to 90 ms of its one thread, in which nobody gets a token. Objects made before the
first request live as long as the process, so later collections can skip them.

Objects that requests make are freed as they end, without a collection: answers leave no cycles. But a hundred
objects of each live for a moment, and by Python's default of 700 a collection would walk them every few requests,
for nothing.

A process that makes large tensors of many sizes, and never again, gives memory back instead.
"""

from __future__ import annotations

import ctypes
import gc

YOUNG = 5000  # net new objects between two collections of the youngest, which take 2 ms


def settle_heap() -> None:
    """Collects garbage once and exempts what is left from later collections, which then run per YOUNG new
    objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def return_freed_memory() -> None:
    """Collects young garbage and gives freed memory back to the system, as far as the C library can.

    A full collection would walk every object of the process each time, and what was made since the last call is
    young.
    """
    gc.collect(1)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from other C libraries than glibc
    if trim is not None:
        trim(0)
