"""The closures that a parsed Lua script consists of; they work on a frame, a list with one slot per local variable.

Knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton.drill.redis.lua_values import OPERATIONS, LuaError, Table, Value, number, true

Frame = list[Value]
Expression = Callable[[Frame], Value]
Statement = Callable[[Frame], object]  # returns None to go on, BREAK, or a ReturnValue


class ReturnValue(NamedTuple):
    """The result of a statement that returned from the script, with its value."""

    value: Value


BREAK = object()


class Variable:
    """An expression that reads a local variable from its slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def __call__(self, frame: Frame) -> Value:
        return frame[self.slot]


class Index:
    """An expression that reads a table's field; raises LuaError if the value is no table."""

    def __init__(self, table: Expression, key: Expression) -> None:
        self.table, self.key = table, key

    def __call__(self, frame: Frame) -> Value:
        table = self.table(frame)
        if not isinstance(table, Table):
            raise LuaError(f"a field of {table!r}")
        return table.fields.get(self.key(frame))


def constant(value: Value) -> Expression:
    """Returns an expression that always gives ``value``."""
    return lambda frame: value


def called(function: Expression, args: list[Expression]) -> Expression:
    """Returns an expression that calls ``function``; several values given by the last argument become several
    arguments.
    """

    def run(frame: Frame) -> Value:
        return function(frame)(_spread([arg(frame) for arg in args]))

    return run


def _spread(values: list[Value]) -> list[Value]:
    """Replaces a list (a function's several values) at the end of ``values`` by its items."""
    if values and isinstance(values[-1], list):
        values[-1:] = values[-1]
    return values


def to_slot(slot: int) -> Callable[[Frame, Value], None]:
    """Returns a function of (frame, value) that assigns to the local variable in ``slot``."""
    return lambda frame, value: frame.__setitem__(slot, value)


def to_target(target: Expression) -> Callable[[Frame, Value], None]:
    """Returns a function of (frame, value) that assigns to a local variable or a table's field. Raises SyntaxError
    for other targets.
    """
    if isinstance(target, Variable):
        return to_slot(target.slot)
    if not isinstance(target, Index):
        raise SyntaxError("this can't be assigned to")
    table, key = target.table, target.key
    return lambda frame, value: table(frame).fields.__setitem__(key(frame), value)


def setting(targets: list[Callable[[Frame, Value], None]], values: list[Expression]) -> Statement:
    """Returns a statement that assigns ``values`` to ``targets``; targets without a value become nil."""

    def run(frame: Frame) -> None:
        found = _spread([value(frame) for value in values])
        for at, target in enumerate(targets):
            target(frame, found[at] if at < len(found) else None)

    return run


def sequence(statements: list[Statement]) -> Statement:
    """Returns a statement that runs ``statements`` in order until one breaks or returns, and passes that on."""

    def run(frame: Frame) -> object:
        for statement in statements:
            if (ended := statement(frame)) is not None:
                return ended
        return None

    return run


def counting(slot: int, given: list[Expression], body: Statement) -> Statement:
    """Returns a numeric ``for`` loop; ``given`` are the expressions for start, end (inclusive) and, optionally,
    step.
    """

    def run(frame: Frame) -> object:
        at, last, *step = (number(value(frame)) for value in given)
        by = step[0] if step else 1
        while at <= last if by > 0 else at >= last:
            frame[slot] = at
            if (ended := body(frame)) is not None:
                return None if ended is BREAK else ended
            at += by
        return None

    return run


def each(slots: list[int], given: Expression, body: Statement) -> Statement:
    """Returns a ``for`` loop over the list part of the table ``given``; ``slots`` are those of the index and the
    value.
    """

    def run(frame: Frame) -> object:
        for at, item in enumerate(given(frame).items(), 1):
            for slot, value in zip(slots, (at, item), strict=False):
                frame[slot] = value
            if (ended := body(frame)) is not None:
                return None if ended is BREAK else ended
        return None

    return run


def nothing(value: Value) -> None:
    """Discards ``value``, the result of a call used as a statement."""


def operation(mark: str, left: Expression, right: Expression) -> Expression:
    """Returns an expression for a binary operator; ``or`` and ``and`` evaluate ``right`` only if needed."""
    if mark == "or":
        return lambda frame: value if true(value := left(frame)) else right(frame)
    if mark == "and":
        return lambda frame: right(frame) if true(value := left(frame)) else value
    operation = OPERATIONS[mark]
    return lambda frame: operation(left(frame), right(frame))
