"""Regular expressions over others' text are linear: a static walk refuses those whose repeats can share characters.

``re`` holds the GIL while it matches, so one that backtracks stops every request of its process.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.sources import modules

parser, sre = re._parser, re._constants  # type: ignore[attr-defined]
OURS = ("baton/kernels/", "baton/drill/")  # they read compilers' output, our own sources and our own Lua scripts
MANY = 256
ANYWHERE = {"search", "findall", "finditer", "sub", "subn", "split", "compile"}
CHARACTERS = [chr(i) for i in range(256)]


def patterns() -> Iterator[tuple[str, str, bool]]:
    """Each literal pattern, where it stands, and whether a search may begin it anywhere."""
    for path, nodes in modules("baton").items():
        for node in nodes if not path.startswith(OURS) else ():
            if isinstance(node, ast.Call) and (found := _pattern(node)) is not None:
                yield found[0], f"{path}:{node.lineno}", found[1]


def _pattern(call: ast.Call) -> tuple[str, bool] | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    of_re = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "re"
    given = call.args[:1] if of_re else [k.value for k in call.keywords if k.arg == "pattern"]
    literal = given[0] if given else None
    if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
        return literal.value, not of_re or name in ANYWHERE
    return None


Item = tuple[str, frozenset[str]]


def _paths(tree, lines: bool) -> Iterator[list[Item]]:
    """Ways through a pattern: "one" character of a set, or "many" of it; optional parts are there and not."""
    ways: list[list[Item]] = [[]]
    for op, value in tree:
        ways = [way + more for way in ways for more in _ways(op, value, lines)]
        assert len(ways) < 20_000
    yield from ways


def _ways(op, value, lines: bool) -> list[list[Item]]:
    if op is sre.SUBPATTERN:
        return list(_paths(value[3], lines))
    if op is sre.ATOMIC_GROUP:
        return list(_paths(value, lines))
    if op is sre.BRANCH:
        return [way for branch in value[1] for way in _paths(branch, lines)]
    if op is sre.AT:
        return [[("start", frozenset())]] if value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING) else [[]]
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, most, body = value
        inner = list(_paths(body, lines))
        if most < MANY:
            return ([[]] if least == 0 else []) + [way * min(max(1, least), 2) for way in inner]
        if len(body) == 1 and len(inner) == 1 and len(inner[0]) == 1 and inner[0][0][0] == "one":
            return [[("many", inner[0][0][1])]]
        if any(kind == "many" for way in inner for kind, _ in way):
            raise ValueError("a repeat inside of a repeat")
        return ([[]] if least == 0 else []) + [way + way for way in inner]
    return [[("one", frozenset(c for c in CHARACTERS if _matches(op, value, c)))]]


def _matches(op, value, character: str) -> bool:
    if op is sre.IN:
        negated = value[0][0] is sre.NEGATE
        return negated != any(_matches(o, v, character) for o, v in value if o is not sre.NEGATE)
    if op is sre.LITERAL:
        return ord(character) == value
    if op is sre.NOT_LITERAL:
        return ord(character) != value
    if op is sre.RANGE:
        return value[0] <= ord(character) <= value[1]
    if op is sre.ANY:
        return character != "\n"
    if op is sre.CATEGORY:
        kinds = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": lambda c: c.isalnum() or c == "_"}
        kind = str(value).removeprefix("CATEGORY_").removeprefix("UNI_")
        return kinds[kind.removeprefix("NOT_")](character) != kind.startswith("NOT_")
    raise ValueError(f"a {op} can't be judged")


def flaw(pattern: str, anywhere: bool) -> str:
    """Returns what makes ``pattern`` slower than linear; "" if nothing does."""
    tree = parser.parse(pattern)
    lines = bool(tree.state.flags & re.MULTILINE)
    try:
        ways = list(_paths(tree, lines))
    except ValueError as error:
        return str(error)
    for way in ways:
        anchored = bool(way) and way[0][0] == "start"
        items = [item for item in way if item[0] != "start"]
        crosses = not anchored or (lines and bool(items) and "\n" in items[0][1])
        may_fail = any(kind == "one" for kind, _ in items[1:])
        if anywhere and crosses and may_fail and items[0][0] == "many":
            return "a search tries the first repeat again from each of its own characters"
        for i, (kind, first) in enumerate(items):
            for j in range(i + 1, len(items)):
                between, (other, second) = items[i + 1 : j], items[j]
                if kind != "many" or other != "many" or not first & second:
                    continue
                if not any(k == "one" and (not s & first or not s & second) for k, s in between):
                    return "two repeats share characters"
    return ""


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str, bool]]:
    return list(patterns())


def test_patterns_over_others_text_are_linear(found: list[tuple[str, str, bool]]) -> None:
    flaws = [(where, pattern, flaw(pattern, anywhere)) for pattern, where, anywhere in found]
    assert [each for each in flaws if each[2]] == []


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"(?m)^\s*root\s*::=", "search"),
        (r"\s+x", "search"),
        (r"^(a+)+$", "inside"),
        (r"^a*.*x$", "share"),
        (r"^\w+\d*x", "share"),
        (r"^[a-z-]*(-[a-z]+)*$", "inside"),
    ],
)
def test_the_walk_finds_what_backtracks(pattern: str, says: str) -> None:
    assert says in flaw(pattern, True)


def test_the_walk_sees_the_patterns_of_the_borders(found: list[tuple[str, str, bool]]) -> None:
    seen = {where.rpartition(":")[0] for _, where, _ in found}
    assert {"baton/protos/grammar.py", "baton/router/api/openai/tools.py", "baton/router/access/keys.py"} <= seen
    assert len(found) > 20
