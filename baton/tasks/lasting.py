"""Work that lasts as long as its owner, in tasks that nobody waits for: one that fails is counted, logged by its
name and begun again, instead of being gone unseen.

Knows nothing of the work, nor of who shows the counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

from baton.protos.rpc import heed_cancel

AGAIN_S, LONGEST_S = 0.1, 30.0  # seconds until failed work begins again, doubled with each failure in a row
HEALTHY_S = 60.0  # seconds after which a failure isn't one in a row any more
Work = Callable[[], Coroutine[object, None, object]]
log = logging.getLogger("baton.tasks")
_listeners: list[Callable[[str], object]] = []


def lasting(work: Work, name: str) -> asyncio.Task[None]:
    """Returns a task called ``name`` that runs ``work()`` until it returns or the task is cancelled; after an
    exception it runs it again.

    ``name`` is one of few, because failures are counted by it.
    """
    return asyncio.create_task(_kept(work, name), name=name)


def count_failure(name: str) -> None:
    """Counts a failed turn of the lasting work ``name``, which has logged it and goes on by itself."""
    for count in _listeners:
        count(name)


@contextmanager
def counting_failures(count: Callable[[str], object]) -> Iterator[None]:
    """Calls ``count`` with the name of each lasting task of this process that fails, or fails at a turn, while
    entered.
    """
    _listeners.append(count)
    try:
        yield
    finally:
        _listeners.remove(count)


async def _kept(work: Work, name: str) -> None:
    now, failures = asyncio.get_running_loop().time, 0
    while True:
        began = now()
        try:
            await work()
        except Exception:
            log.exception("the task %r failed and begins again", name)
            count_failure(name)
        else:
            return
        heed_cancel()
        failures = 0 if now() - began > HEALTHY_S else failures
        await asyncio.sleep(min(AGAIN_S * 2 ** min(failures, 20), LONGEST_S))
        failures += 1
