"""Joins the JSON schemas of several tools' arguments to one schema of any call of them.

Knows nothing of requests or of any model's call format. References are JSON pointers into the schema that they
stand in (RFC 6901; JSON Schema 2020-12, section 8.2.3), so they follow it to its new place.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.protos.json import Json

# Keywords with schemas by names of the client's, and keywords whose values are data, in which nothing is a keyword.
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
DATA = frozenset({"enum", "const", "default", "examples"})


def call_schema(tools: Sequence[tuple[str, Json]], key: str) -> Json:
    """Returns the JSON schema of any one call of ``tools``, (name, schema of the arguments), which stand under
    ``key``.
    """
    definitions = {str(i): moved(arguments, f"#/$defs/{i}") for i, (_, arguments) in enumerate(tools)}
    return {"anyOf": [_call(i, name, key) for i, (name, _) in enumerate(tools)], "$defs": definitions}


def moved(schema: Json, place: str) -> Json:
    """Returns ``schema``, a whole document, for a place of a larger one to which the reference ``place`` points."""
    return {key: _moved_value(key, value, place) for key, value in schema.items() if key != "$id"}


def _call(number: int, name: str, key: str) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{number}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved_value(key: str, value: object, place: str) -> object:
    """Returns the value of keyword ``key`` with the references in it following its schema."""
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    if key in DATA:
        return value
    if key in NAMED and isinstance(value, dict):
        return {name: _moved_part(part, place) for name, part in value.items()}
    return _moved_part(value, place)


def _moved_part(part: object, place: str) -> object:
    """Returns a schema, or a list of them, with its references following it; one with an id of its own has its own
    root.
    """
    if isinstance(part, list):
        return [_moved_part(each, place) for each in part]
    if not isinstance(part, dict) or "$id" in part:
        return part
    return {key: _moved_value(key, value, place) for key, value in part.items()}
