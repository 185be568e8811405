"""Values of Lua 5.1 as Baton's Redis scripts use them, and the library functions that those scripts call.

Strings are bytes, tables are ``Table``s, nil is None, functions take a list of values; one that gives several
values returns a list. Knows nothing of parsing or of Redis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

CLASSES = {"d": "[0-9]", "a": "[A-Za-z]", "w": "[0-9A-Za-z]", "s": r"\s"}
NUMERAL = re.compile(rb"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.IGNORECASE)
EXACT_DIGITS = 16  # of an integer from which on a double may not hold it
Value = Any  # None, bool, int, float, bytes, Table, or a function of a list of values


class LuaError(Exception):
    """Raised if a script does what Lua refuses, such as arithmetic on nil."""


class Table:
    """A Lua table, whose list part begins at index 1."""

    def __init__(self, items: Sequence[Value] = ()) -> None:
        self.fields: dict[Value, Value] = dict(enumerate(items, 1))

    def __len__(self) -> int:
        count = len(self.fields)
        while count and self.fields.get(count) is None:
            count -= 1
        return count

    def items(self) -> list[Value]:
        """Returns the values of the list part, up to its first nil."""
        found: list[Value] = []
        while (item := self.fields.get(len(found) + 1)) is not None:
            found.append(item)
        return found


def as_bytes(value: Value) -> bytes:
    """Returns a string or number as the bytes that ``redis.call`` sends. Raises LuaError for other values."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LuaError("arguments of redis.call are strings and numbers")
    return b"%d" % value if math.isfinite(value) and value == int(value) else b"%.17g" % value


def tonumber(given: list[Value]) -> Value:
    """Returns the number that the first of ``given`` is or spells, as Lua's ``tonumber`` does; None if it is no
    number.
    """
    value = given[0] if given else None
    if isinstance(value, bytes):
        if value.isdigit():
            return int(value) if len(value) < EXACT_DIGITS else _integral(float(value))
        if not NUMERAL.fullmatch(value):
            return None
        return _integral(float(value))
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integral(number: float) -> int | float:
    return int(number) if math.isfinite(number) and number == int(number) else number


def number(value: Value) -> Value:
    """Returns ``value`` as a number; strings that spell one are converted. Raises LuaError for other values."""
    if type(value) is int or type(value) is float:
        return value
    found = tonumber([value])
    if found is None:
        raise LuaError(f"arithmetic on {value!r}")
    return found


def _sub(given: list[Value]) -> bytes:
    text, first, last = given[0], int(number(given[1])), int(number(given[2])) if len(given) > 2 else -1
    first = max(1, first if first >= 0 else len(text) + first + 1)
    return text[first - 1 : last if last >= 0 else len(text) + last + 1]


def _match(given: list[Value]) -> Value:
    found = re.search(_pattern(given[1]), given[0], re.DOTALL)
    if found is None:
        return None
    return list(found.groups()) if found.groups() else found[0]


def _pattern(lua: bytes) -> bytes:
    out, at = "", 0
    text = lua.decode()
    while at < len(text):
        one = text[at]
        if one == "%":
            at += 1
            out += CLASSES.get(text[at]) or re.escape(text[at])
        elif one == "$":
            out += r"\Z" if at == len(text) - 1 else r"\$"
        elif one in "()*+.^[]":
            out += one
        elif one in "-?":
            raise LuaError(f"the pattern {text!r} has {one!r}, which isn't known here")
        else:
            out += re.escape(one)
        at += 1
    return out.encode()


def ipairs(given: list[Value]) -> Value:
    """Returns the first of ``given``, a table, whose list part the loop then iterates over."""
    return given[0]


def _library(**functions: Callable[[list[Value]], Value]) -> Table:
    table = Table()
    table.fields |= {name.encode(): function for name, function in functions.items()}
    return table


STRING = _library(sub=_sub, match=_match)
MATH = _library(
    floor=lambda given: math.floor(number(given[0])),
    ceil=lambda given: math.ceil(number(given[0])),
    min=lambda given: min(map(number, given)),
    max=lambda given: max(map(number, given)),
)
# What a script finds in the first slots of its frame.
PLACES = ("KEYS", "ARGV", "redis", "string", "math", "tonumber", "ipairs")


def true(value: Value) -> bool:
    """Returns whether Lua counts ``value`` as true: all but nil and false."""
    return value is not None and value is not False


def _equal(a: Value, b: Value) -> bool:
    return a is b if isinstance(a, bool) or isinstance(b, bool) else a == b


def _less(a: Value, b: Value) -> bool:
    if isinstance(a, bytes) is not isinstance(b, bytes):
        raise LuaError(f"{a!r} is compared with {b!r}")
    return bool(a < b)


def text(value: Value) -> bytes:
    """Returns a string as it is, a number as Lua's ``..`` writes it. Raises LuaError for other values."""
    if isinstance(value, bytes):
        return value
    found = number(value)
    return b"%d" % found if abs(found) < 1e14 and found == int(found) else b"%.14g" % found


OPERATIONS: dict[str, Callable[[Value, Value], Value]] = {
    "==": _equal,
    "~=": lambda a, b: not _equal(a, b),
    "<": _less,
    ">": lambda a, b: _less(b, a),
    "<=": lambda a, b: not _less(b, a),
    ">=": lambda a, b: not _less(a, b),
    "..": lambda a, b: text(a) + text(b),
    "+": lambda a, b: number(a) + number(b),
    "-": lambda a, b: number(a) - number(b),
    "*": lambda a, b: number(a) * number(b),
    "/": lambda a, b: number(a) / number(b),
}
