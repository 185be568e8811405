"""Makes a script's closures as it is read: over a frame, one slot per local. Knows nothing of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton.drill.redis.lua_values import OPERATIONS, LuaError, Table, Value, number, true

Frame = list[Value]
Expression = Callable[[Frame], Value]
Statement = Callable[[Frame], object]  # returns None to go on, BREAK, or a Returned


class Returned(NamedTuple):
    """Says that the script returned."""

    value: Value


BREAK = object()


class Variable:
    """A local, as an expression."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def __call__(self, frame: Frame) -> Value:
        return frame[self.slot]


class Index:
    """A table's field, as an expression."""

    def __init__(self, table: Expression, key: Expression) -> None:
        self.table, self.key = table, key

    def __call__(self, frame: Frame) -> Value:
        table = self.table(frame)
        if not isinstance(table, Table):
            raise LuaError(f"a field of {table!r}")
        return table.fields.get(self.key(frame))


def constant(value: Value) -> Expression:
    """Returns an expression that is ``value``."""
    return lambda frame: value


def called(function: Expression, args: list[Expression]) -> Expression:
    """Returns a call of a function. The last argument may give several values."""

    def run(frame: Frame) -> Value:
        return function(frame)(_spread([arg(frame) for arg in args]))

    return run


def _spread(values: list[Value]) -> list[Value]:
    """Spreads a function's several values where they come last."""
    if values and isinstance(values[-1], list):
        values[-1:] = values[-1]
    return values


def to_slot(slot: int) -> Callable[[Frame, Value], None]:
    """Returns what assigns to a local."""
    return lambda frame, value: frame.__setitem__(slot, value)


def to_target(target: Expression) -> Callable[[Frame, Value], None]:
    """Returns what assigns to a local or to a field. Raises SyntaxError for anything else."""
    if isinstance(target, Variable):
        return to_slot(target.slot)
    if not isinstance(target, Index):
        raise SyntaxError("this can't be assigned to")
    table, key = target.table, target.key
    return lambda frame, value: table(frame).fields.__setitem__(key(frame), value)


def setting(targets: list[Callable[[Frame, Value], None]], values: list[Expression]) -> Statement:
    """Returns the assignment of ``values`` to ``targets``; what has no value becomes nil."""

    def run(frame: Frame) -> None:
        found = _spread([value(frame) for value in values])
        for at, target in enumerate(targets):
            target(frame, found[at] if at < len(found) else None)

    return run


def sequence(statements: list[Statement]) -> Statement:
    """Returns statements that run in order, until one ends them."""

    def run(frame: Frame) -> object:
        for statement in statements:
            if (ended := statement(frame)) is not None:
                return ended
        return None

    return run


def counting(slot: int, given: list[Expression], body: Statement) -> Statement:
    """Returns a loop over numbers: from, to, and by, if given."""

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
    """Returns a loop over a table's list part."""

    def run(frame: Frame) -> object:
        for at, item in enumerate(given(frame).items(), 1):
            for slot, value in zip(slots, (at, item), strict=False):
                frame[slot] = value
            if (ended := body(frame)) is not None:
                return None if ended is BREAK else ended
        return None

    return run


def nothing(value: Value) -> None:
    """Drops what a call answered."""


def operation(mark: str, left: Expression, right: Expression) -> Expression:
    """Returns an operation on two expressions; ``or`` and ``and`` look at the second where they must."""
    if mark == "or":
        return lambda frame: value if true(value := left(frame)) else right(frame)
    if mark == "and":
        return lambda frame: right(frame) if true(value := left(frame)) else value
    operation = OPERATIONS[mark]
    return lambda frame: operation(left(frame), right(frame))
