"""Typing of arguments that a format of calls writes as bare text: JSON by what the tool's schema allows.

Knows nothing of formats. Of a value that may be text or something else, what reads as something else is that.
"""

from __future__ import annotations

import json
from typing import NoReturn

from baton.protos.json import Json

STRING = "string"
TEXT = frozenset({STRING})
_MOST_DEEP = 16  # references to references
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # in lower case: also Python's


def allowed_types(schema: object, root: Json) -> frozenset[str]:
    """Returns the JSON types ("string", "integer", …) that ``schema``, a part of ``root``, allows; none for any."""
    found, seen, left = set[str](), set[int](), [schema]
    while left:
        part = resolved(left.pop(), root)
        if not isinstance(part, dict) or id(part) in seen:  # references may go in circles
            continue
        seen.add(id(part))
        given = part.get("type")
        if given is not None:
            found |= {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
            continue
        values = part["enum"] if isinstance(part.get("enum"), list) else []
        found |= {_type_of(value) for value in [*values, *([part["const"]] if "const" in part else [])]}
        for name in ("anyOf", "oneOf", "allOf"):
            left += part[name] if isinstance(part.get(name), list) else []
    return frozenset(found)


def resolved(schema: object, root: Json) -> object:
    """Returns what a schema's reference into ``root`` points to, the schema itself without one, {} if it leads
    nowhere.
    """
    for _ in range(_MOST_DEEP):
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
