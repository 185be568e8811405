"""An interpreter of the part of Lua 5.1 that Baton's Redis scripts use; a script is parsed once and run often.

It runs the scripts' real text, so a changed script is simulated as changed. Strings are bytes, tables are
``Table``s, nil is None. Parsing raises SyntaxError for unsupported code. Knows nothing of Redis: commands go
through the caller's ``call``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from baton.drill.redis.lua_run import (
    BREAK,
    Expression,
    Frame,
    Index,
    ReturnValue,
    Statement,
    Variable,
    called,
    constant,
    counting,
    each,
    nothing,
    operation,
    sequence,
    setting,
    to_slot,
    to_target,
)  # fmt: skip
from baton.drill.redis.lua_values import (
    MATH,
    PLACES,
    STRING,
    Table,
    Value,
    as_bytes,
    ipairs,
    number,
    tonumber,
    true,
)

TOKEN = re.compile(
    r"(?P<space>(?:\s|--[^\n]*)+)|(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|'(?P<text>[^'\\\n]*)'|(?P<mark>\.\.|==|~=|<=|>=|[-+*/#<>=(){}\[\],;.])"
)
WORDS = {
    "and", "break", "do", "else", "elseif", "end", "false", "for", "if", "in", "local", "nil", "not", "or",
    "return", "then", "true", "while",
}  # fmt: skip
BINARY = {
    "or": 1, "and": 2, "<": 3, ">": 3, "<=": 3, ">=": 3, "==": 3, "~=": 3, "..": 4, "+": 5, "-": 5, "*": 6, "/": 6,
}  # fmt: skip
UNARY_POWER = 7  # binding power of Lua's unary operators, between ``*`` and ``^`` (Lua 5.1, 2.5.6)
Call = Callable[[list[bytes]], Value]


class Script:
    """A Lua script that is parsed when made. Raises SyntaxError for code outside the supported part of Lua."""

    def __init__(self, source: str) -> None:
        reader = _Reader(source)
        self._body = reader.block(("",))
        self._size = reader.slots

    def run(self, keys: Sequence[bytes], args: Sequence[bytes], call: Call) -> Value:
        """Runs the script with KEYS and ARGV; returns its value. ``call`` runs a Redis command and returns its
        answer for Lua.

        Raises LuaError for what Lua refuses.
        """
        frame: Frame = [None] * self._size
        frame[0], frame[1], frame[2] = Table(keys), Table(args), _redis(call)
        frame[3:7] = STRING, MATH, tonumber, ipairs
        ended = self._body(frame)
        return ended.value if isinstance(ended, ReturnValue) else None


def _redis(call: Call) -> Table:
    table = Table()
    table.fields[b"call"] = lambda given: call([as_bytes(value) for value in given])
    return table


# ---- reading ----


class _Reader:
    """Parses a script into closures; each local variable has a slot in the frame."""

    def __init__(self, source: str) -> None:
        self._tokens = list(_tokens(source))
        self._at = 0
        self._scopes: list[dict[str, int]] = [{name: i for i, name in enumerate(PLACES)}]
        self.slots = len(PLACES)

    # ---- tokens ----

    @property
    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at]

    def _take(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _sees(self, *texts: str) -> bool:
        kind, text = self._next
        return kind in ("mark", "word", "end") and text in texts

    def _accept(self, text: str) -> bool:
        if self._sees(text):
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise SyntaxError(f"{text!r} is expected where {self._next[1]!r} stands")

    def _name(self) -> str:
        kind, text = self._take()
        if kind != "name":
            raise SyntaxError(f"a name is expected where {text!r} stands")
        return text

    def _declare(self, name: str) -> int:
        self._scopes[-1][name] = slot = self.slots
        self.slots += 1
        return slot

    def _slot(self, name: str) -> int:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise SyntaxError(f"{name!r} is not known here")

    # ---- statements ----

    def block(self, ends: Sequence[str]) -> Statement:
        """Parses statements up to one of the words ``ends``, which is left unread."""
        self._scopes.append({})
        statements: list[Statement] = []
        while not self._sees(*ends):
            statements.append(self._statement())
            self._accept(";")
        self._scopes.pop()
        return sequence(statements)

    def _statement(self) -> Statement:
        for word, read in (
            ("local", self._local), ("if", self._if), ("for", self._for), ("while", self._while),
            ("return", self._return),
        ):  # fmt: skip
            if self._accept(word):
                return read()
        if self._accept("break"):
            return lambda frame: BREAK
        return self._assignment()

    def _local(self) -> Statement:
        names = [self._name()]
        while self._accept(","):
            names.append(self._name())
        values = self._list() if self._accept("=") else []
        slots = [self._declare(name) for name in names]
        return setting([to_slot(slot) for slot in slots], values)

    def _assignment(self) -> Statement:
        first = self._suffixed()
        if not self._sees("=", ","):
            return lambda frame: nothing(first(frame))
        targets = [to_target(first)]
        while self._accept(","):
            targets.append(to_target(self._suffixed()))
        self._expect("=")
        return setting(targets, self._list())

    def _if(self) -> Statement:
        branches = [self._branch()]
        other: Statement = sequence([])
        while self._accept("elseif"):
            branches.append(self._branch())
        if self._accept("else"):
            other = self.block(("end",))
        self._expect("end")

        def run(frame: Frame) -> object:
            for condition, body in branches:
                if true(condition(frame)):
                    return body(frame)
            return other(frame)

        return run

    def _branch(self) -> tuple[Expression, Statement]:
        condition = self.expression()
        self._expect("then")
        return condition, self.block(("elseif", "else", "end"))

    def _while(self) -> Statement:
        condition = self.expression()
        self._expect("do")
        body = self.block(("end",))
        self._expect("end")

        def run(frame: Frame) -> object:
            while true(condition(frame)):
                if (ended := body(frame)) is not None:
                    return None if ended is BREAK else ended
            return None

        return run

    def _for(self) -> Statement:
        names = [self._name()]
        while self._accept(","):
            names.append(self._name())
        counted = self._accept("=")
        if not counted:
            self._expect("in")
        given = self._list()
        self._expect("do")
        self._scopes.append({})
        slots = [self._declare(name) for name in names]
        body = self.block(("end",))
        self._scopes.pop()
        self._expect("end")
        return counting(slots[0], given, body) if counted else each(slots, given[0], body)

    def _return(self) -> Statement:
        if self._sees("end", "else", "elseif", ""):
            return lambda frame: ReturnValue(None)
        value = self.expression()
        return lambda frame: ReturnValue(value(frame))

    # ---- expressions ----

    def _list(self) -> list[Expression]:
        found = [self.expression()]
        while self._accept(","):
            found.append(self.expression())
        return found

    def expression(self, power: int = 0) -> Expression:
        """Parses an expression whose binary operators have a precedence above ``power``."""
        left = self._unary()
        while self._next[0] in ("mark", "word") and (own := BINARY.get(self._next[1], 0)) > power:
            mark = self._take()[1]
            right = self.expression(own - 1 if mark == ".." else own)
            left = operation(mark, left, right)
        return left

    def _unary(self) -> Expression:
        if self._accept("not"):
            inner = self.expression(UNARY_POWER)
            return lambda frame: not true(inner(frame))
        if self._accept("-"):
            inner = self.expression(UNARY_POWER)
            return lambda frame: -number(inner(frame))
        if self._accept("#"):
            inner = self.expression(UNARY_POWER)
            return lambda frame: len(inner(frame))
        return self._simple()

    def _simple(self) -> Expression:
        kind, text = self._next
        if kind == "number":
            self._take()
            return constant(tonumber([text.encode()]))
        if kind == "text":
            self._take()
            return constant(text.encode())
        if kind == "word" and text in ("nil", "true", "false"):
            self._take()
            return constant({"nil": None, "true": True, "false": False}[text])
        if self._accept("{"):
            items = [] if self._sees("}") else self._list()
            self._expect("}")
            return lambda frame: Table([item(frame) for item in items])
        return self._suffixed()

    def _suffixed(self) -> Expression:
        if self._accept("("):
            inner = self.expression()
            self._expect(")")
        else:
            inner = Variable(self._slot(self._name()))
        while True:
            if self._accept("."):
                inner = Index(inner, constant(self._name().encode()))
            elif self._accept("["):
                inner = Index(inner, self.expression())
                self._expect("]")
            elif self._accept("("):
                args = [] if self._sees(")") else self._list()
                self._expect(")")
                inner = called(inner, args)
            else:
                return inner


def _tokens(source: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(source):
        token = TOKEN.match(source, at)
        if token is None:
            raise SyntaxError(f"this is not known here: {source[at : at + 20]!r}")
        at, kind = token.end(), str(token.lastgroup)
        text = token[kind]
        if kind != "space":
            found.append(("word" if kind == "name" and text in WORDS else kind, text))
    return [*found, ("end", "")]
