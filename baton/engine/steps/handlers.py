"""Maps each type of message on the local channel to its handler; a loop's table must cover every member of a union.

Knows nothing of what the messages mean. A table costs one look-up per message; a ``match`` over as many classes
tries one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar, get_args

from baton.protos.channel import ToEngine

M = TypeVar("M", bound=ToEngine)
Table = dict[type, Callable[[Any], None]]


class Handlers:
    """Collects one handler per message type; type checkers verify that each takes its message."""

    def __init__(self) -> None:
        self._table: Table = {}

    def on(self, message: type[M], handle: Callable[[M], None]) -> Self:
        """Adds ``handle`` for messages of the type ``message``; returns this collection."""
        assert message not in self._table, f"{message.__name__} has two handlers"
        self._table[message] = handle
        return self

    def covering(self, union: object) -> Table:
        """Returns the table of handlers by message type. Asserts that it has one for each member of ``union``, and
        no others.
        """
        differing = set(get_args(union)) ^ set(self._table)
        assert not differing, f"without a handler, or without a message: {sorted(t.__name__ for t in differing)}"
        return self._table
