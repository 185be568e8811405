"""Runs independent simulations in processes side by side. Knows nothing of what they simulate.

The processes are started anew, not forked: a fork of a process with threads has their locks and lacks them. That of
a process that has used gRPC can wait for ever for a thread which only its parent has.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, cast

from baton.protos.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[..., object] | None = None  # set once in each process, because it may hold a large trace


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def each(work: Callable[[Item], Result], items: Sequence[Item], processes: int = 1) -> Iterator[Result]:
    """Yields ``work(item)`` for each item, in their order, computed in up to ``processes`` new processes.

    ``work``, items and results are pickled on their way. With one process or one item nothing is started. What
    ``work`` raises is raised here. Raises ConfigError if a process is killed or can't start.
    """
    if min(processes, len(items)) < 2:
        yield from map(work, items)
        return
    anew = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(items)), anew, initializer=_take, initargs=(work,)) as pool:
        try:
            yield from cast(Iterator[Result], pool.map(_one, items))
        except BrokenProcessPool as error:
            text = "a process of the simulation was killed, for want of memory perhaps, or couldn't start, as its"
            text = f"{text} output says; use fewer cores (taskset -c 0-1 ...), as each has its own"
            raise ConfigError(text, "workers") from error


def _take(work: Callable[..., object]) -> None:
    global _work
    _work = work


def _one(item: object) -> object:
    assert _work is not None
    return _work(item)
