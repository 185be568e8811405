"""Runs independent simulations in processes side by side. Knows nothing of what they simulate."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[..., object] | None = None  # set in a child process, because a closure can't be sent to one


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def each(work: Callable[[Item], Result], items: Sequence[Item], processes: int = 1) -> Iterator[Result]:
    """Yields ``work(item)`` for each item, in their order, computed in up to ``processes`` forked processes.

    A result is pickled on its way back; ``work`` isn't: children inherit it. With one process or one item nothing
    is forked. What ``work`` raises is raised here.
    """
    if min(processes, len(items)) < 2:
        yield from map(work, items)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(processes, len(items)), fork, initializer=partial(_inherit, work)) as pool:
        yield from cast(Iterator[Result], pool.map(_one, items))


def _inherit(work: Callable[..., object]) -> None:
    global _work
    _work = work


def _one(item: object) -> object:
    assert _work is not None
    return _work(item)
