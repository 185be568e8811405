"""Runs independent simulations in processes side by side. Knows nothing of what they simulate."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TypeVar, cast

from baton.protos.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[..., object] | None = None  # set in a child process, because a closure can't be sent to one


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def each(work: Callable[[Item], Result], items: Sequence[Item], processes: int = 1) -> Iterator[Result]:
    """Yields ``work(item)`` for each item, in their order, computed in up to ``processes`` forked processes.

    A result is pickled on its way back; ``work`` isn't: children inherit it. With one process or one item nothing
    is forked. What ``work`` raises is raised here. Raises ConfigError if a process is killed.
    """
    if min(processes, len(items)) < 2:
        yield from map(work, items)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(processes, len(items)), fork, initializer=partial(_inherit, work)) as pool:
        try:
            yield from cast(Iterator[Result], pool.map(_one, items))
        except BrokenProcessPool as error:
            text = "a process of the simulation was killed, for want of memory perhaps"
            raise ConfigError(
                f"{text}; use fewer cores (taskset -c 0-1 ...), as each has its own", "workers"
            ) from error


def _inherit(work: Callable[..., object]) -> None:
    global _work
    _work = work


def _one(item: object) -> object:
    assert _work is not None
    return _work(item)
