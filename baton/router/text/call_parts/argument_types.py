"""Typing of arguments that a format of calls writes as bare text: JSON by what the tool's schema allows.

Knows nothing of formats. Of a value that may be text or something else, what reads as something else is that.
"""

from __future__ import annotations

import json
from typing import NoReturn

from baton.protos.json import Json

STRING = "string"
TEXT = frozenset({STRING})
MOST_DEEP = 16  # references to references, and choices within choices
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # in lower case: also Python's


def allowed_types(schema: object, root: Json) -> frozenset[str]:
    """Returns the JSON types ("string", "integer", …) that ``schema``, a part of ``root``, allows; none for any."""
    return _types(schema, root, {}, 0) or frozenset()


def _types(
    schema: object, root: Json, known: dict[int, frozenset[str] | None], depth: int
) -> frozenset[str] | None:
    """Returns the types, or None for any; ``known`` are those of the schemas that were met, each read once."""
    part = resolved(schema, root)
    if not isinstance(part, dict) or depth > MOST_DEEP:
        return None
    if id(part) not in known:
        known[id(part)] = frozenset()  # of a schema within itself: references may go in circles
        known[id(part)] = _types_of_part(part, root, known, depth)
    return known[id(part)]


def _types_of_part(
    part: Json, root: Json, known: dict[int, frozenset[str] | None], depth: int
) -> frozenset[str] | None:
    given = part.get("type")
    if given is not None:
        return frozenset(name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str))
    if isinstance(part.get("enum"), list) or "const" in part:
        return frozenset(map(_type_of, part["enum"] if isinstance(part.get("enum"), list) else [part["const"]]))
    for name in ("anyOf", "oneOf", "allOf"):
        members = part[name] if isinstance(part.get(name), list) else []
        found = [_types(member, root, known, depth + 1) for member in members]
        if found and (name == "allOf" or None not in found):
            return frozenset().union(*(types for types in found if types is not None)) or None
    return None


def resolved(schema: object, root: Json) -> object:
    """Returns what a schema's reference into ``root`` points to, the schema itself without one, {} if it leads
    nowhere.
    """
    for _ in range(MOST_DEEP):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        found: object = root
        for key in schema["$ref"].removeprefix("#").split("/")[1:]:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = {} if found is None else found
    return {}


def json_text(text: str, types: frozenset[str]) -> str:
    """Returns the JSON text of an argument that was written as ``text``; a string where nothing else fits."""
    found = text.strip()
    found = _WORDS.get(found.lower(), found)
    if types != TEXT and _fits(found, types):
        return found
    return json.dumps(text, ensure_ascii=False)


def _fits(text: str, types: frozenset[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    found = _type_of(value)
    if not types:
        return found != STRING  # quotes belong to a text that is written bare
    if found == "integer" or (isinstance(value, float) and value.is_integer()):
        return "integer" in types or "number" in types
    return found in types - TEXT


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: STRING, list: "array", dict: "object"}
    return kinds[type(value)]


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
