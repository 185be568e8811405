"""The forms that a schema allows a bare text to have: one of some values, or text within bounds.

Knows nothing of tags or grammars. What a regular expression can't say of a schema is refused, never left unheld.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from baton.protos.json import Json
from baton.router.text.call_parts.argument_types import MOST_DEEP, STRING, allowed_types, json_text, resolved

SAID = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated"})
CHAR = r"(.|\n)"
_OF_VALUES = SAID | {"type", "enum", "const"}
_OF_TEXT = SAID | {"type", "minLength", "maxLength", "pattern"}
_CHOICES = ("anyOf", "oneOf")
_INTEGER = r"-?(0|[1-9][0-9]*)"
# The texts that are read as each type, of those that a text may be beside a string.
_READ_AS = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
_NESTED = "may be text or an object, which this format writes alike"
_BOUNDED = "may be text or some values of another type, which this format writes alike"
_PART_OF_PATTERN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class UnheldText(Exception):
    """Says why a bare text can't be held to its schema: words that follow the parameter's name."""


class TextForm(msgspec.Struct, frozen=True):
    """Holds one form: either ``values``, the texts that it may be, or ``bounds``, all of which it matches: regular
    expressions of whole texts, as they stand between slashes.
    """

    values: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()


def text_forms(schema: object, root: Json) -> list[TextForm]:
    """Returns the forms of a text that matches ``schema``, a part of ``root``, as ``json_text`` reads it.

    Raises UnheldText.
    """
    types = allowed_types(schema, root)
    members = list(_members(schema, root, set(), 0))
    listed = [member for member in members if _is_listed(member)]
    free = [member for member in members if not _is_listed(member)]
    values = [value for member in listed for value in _values(member)]
    free_types = [allowed_types(member, root) for member in free]
    plain = {name for names in free_types for name in names}
    if plain - _READ_AS.keys() - {STRING}:
        raise UnheldText(_NESTED)
    if any(not names or STRING in names for names in free_types):
        _check_values_beside_text(values, plain)
    forms = [form for member, names in zip(free, free_types, strict=True) for form in _free(member, names)]
    return [*forms, _listed(values, types, plain)] if listed else forms


def _members(schema: object, root: Json, seen: set[int], depth: int) -> Iterator[Json]:
    """Yields the schemas of which a text has to match one; those in ``seen`` were yielded."""
    if depth > MOST_DEEP:
        raise UnheldText(f"has over {MOST_DEEP} choices within choices")
    if isinstance(schema, dict) and "$ref" in schema:
        _check(schema, SAID | {"$ref"})
        schema = resolved(schema, root)
    if not isinstance(schema, dict):
        if schema is False:
            raise UnheldText("allows no value")
        yield {}
        return
    if id(schema) in seen:
        return
    seen.add(id(schema))
    name = next((name for name in _CHOICES if name in schema), None)
    if name is None:
        yield schema
        return
    _check(schema, SAID | {name})
    members = schema[name]
    if not isinstance(members, list) or not members:
        raise UnheldText(f"has an {name} of nothing")
    if name == "oneOf":
        _check_apart([allowed_types(member, root) for member in members])
    for member in members:
        yield from _members(member, root, seen, depth + 1)


def _check_apart(members: list[frozenset[str]]) -> None:
    """Raises UnheldText if a value may match two of the members of a ``oneOf``, by their types."""
    seen = set[str]()
    for types in members:
        widened = types | ({"integer", "number"} if types & {"integer", "number"} else frozenset())
        if not types or widened & seen:
            raise UnheldText("has a oneOf whose members may both match, to which bare text can't be held")
        seen |= widened


def _check(schema: Json, known: frozenset[str]) -> None:
    unknown = sorted(schema.keys() - known)
    if unknown:
        raise UnheldText(f"has {unknown[0]!r}, to which bare text can't be held")


# ---- values --------------------------------------------------------------------------------------------


def _is_listed(schema: Json) -> bool:
    return "enum" in schema or "const" in schema


def _values(schema: Json) -> list[object]:
    """Returns the values that ``schema`` lists, of the types that it allows."""
    _check(schema, _OF_VALUES)
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise UnheldText("has an enum of nothing")
    if "const" in schema:
        values = [value for value in values if _key(value) == _key(schema["const"])]
    types = allowed_types({"type": schema.get("type")}, {})
    return [value for value in values if not types or _is_of(value, types)]


def _listed(values: list[object], types: frozenset[str], plain: set[str]) -> TextForm:
    """Returns the form of the texts that are read as one of ``values``, or as any value of the types ``plain``."""
    texts = dict.fromkeys(value if isinstance(value, str) else json.dumps(value) for value in values)
    keys = set(map(_key, values))
    held = [text for text in texts if _is_held(json.loads(json_text(text, types)), keys, plain)]
    if not held:
        raise UnheldText("has an enum of nothing that its type allows")
    return TextForm(values=tuple(held))


def _is_held(read: object, keys: set[object], plain: set[str]) -> bool:
    return _key(read) in keys or (not isinstance(read, str) and _is_of(read, plain))


def _check_values_beside_text(values: list[object], plain: set[str]) -> None:
    """Raises UnheldText if a text beside ``values`` could be read as a value of their types that isn't listed."""
    for value in values:
        if not isinstance(value, str) and value is not None and not _is_of(value, plain):
            raise UnheldText(_BOUNDED)


def _is_of(value: object, types: frozenset[str] | set[str]) -> bool:
    found = allowed_types({"const": value}, {})
    return bool(found & types) or ("number" in types and "integer" in found)


def _key(value: object) -> object:
    """Returns what two values have in common if and only if JSON schema takes them for equal."""
    return (json.dumps(value, sort_keys=True),) if isinstance(value, (list, dict)) else (type(value) is bool, value)


# ---- text within bounds --------------------------------------------------------------------------------


def _free(schema: Json, types: frozenset[str]) -> Iterator[TextForm]:
    if not types or STRING in types:
        _check(schema, _OF_TEXT)
        yield TextForm(bounds=tuple(_bounds(schema)))
    else:
        try:
            _check(schema, SAID | {"type"})
        except UnheldText:
            raise UnheldText(_BOUNDED) from None
    for name in sorted(types - {STRING}):
        yield TextForm(bounds=(_READ_AS[name],))


def _bounds(schema: Json) -> Iterator[str]:
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    if not all(n is None or (isinstance(n, int) and n >= 0) for n in (least, most)):
        raise UnheldText("has a length that is no whole number from 0 on")
    yield f"{CHAR}{{{least or 0:d},{'' if most is None else int(most)}}}"
    if isinstance(pattern, str):
        yield anchored(pattern)


def anchored(pattern: str) -> str:
    """Returns the regular expression, as it stands between slashes, of texts in which JSON schema finds
    ``pattern``.
    """
    return f"({'|'.join(map(_anchored_branch, _branches(pattern)))})"


def _branches(pattern: str) -> list[list[str]]:
    """Returns the parts of each alternative of ``pattern`` that stands in no group."""
    found, depth = [list[str]()], 0
    for part in _PART_OF_PATTERN.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append([])
        else:
            found[-1].append(part)
        if depth < 0:
            break
    if depth:
        raise UnheldText("has a pattern whose brackets don't match")
    return found


def _anchored_branch(parts: list[str]) -> str:
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    body = "".join(map(_slashed, parts[begins : len(parts) - ends]))
    return f"{'' if begins else f'{CHAR}*'}({body}){'' if ends else f'{CHAR}*'}"


def _slashed(part: str) -> str:
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", part, flags=re.DOTALL)
