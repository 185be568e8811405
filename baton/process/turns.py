"""Spreads many short calls over turns of the event loop, so that between them it serves others.

Knows nothing of what is called. A call that wakes a task costs what that task does then: a lost worker wakes
thousands at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

A_TURN = 500  # calls per turn: tasks that each take 20 us once they are woken hold the loop for 10 ms

T = TypeVar("T")


def call_in_turns(call: Callable[[T], object], items: Iterable[T]) -> None:
    """Calls ``call`` with each of ``items``: with the first A_TURN now, with as many in each later turn of the
    running loop.
    """
    _next_turn(call, deque(items))


def _next_turn(call: Callable[[T], object], left: deque[T]) -> None:
    for _ in range(min(A_TURN, len(left))):
        call(left.popleft())
    if left:
        asyncio.get_running_loop().call_soon(_next_turn, call, left)
