"""Tests that a tool's schema means in a grammar of all tools' calls what it means alone, references included."""

from __future__ import annotations

import json

import jsonschema
import pytest

from baton.protos.grammar import byte_tokenizer, compiled
from baton.protos.nouns import Grammar
from baton.router.api.openai.tool_schema import call_schema

LINK = {"$ref": "#/$defs/a"}


def object_of(**properties: object) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# A schema, arguments that follow it, arguments that don't.
CASES = {
    "its own root": (
        object_of(x={"enum": ["a"]}, child={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        {"x": "a", "child": {"x": "a", "child": None}},
        {"x": "a", "child": {"name": "one", "arguments": {"x": "a", "child": None}}},
    ),
    "a property of it": (
        object_of(x={"enum": ["a"]}, y={"$ref": "#/properties/x"}),
        {"x": "a", "y": "a"},
        {"x": "a", "y": "b"},
    ),
    "a definition": (object_of(x=LINK) | {"$defs": {"a": {"enum": ["q"]}}}, {"x": "q"}, {"x": "r"}),
    "an escaped name": (
        object_of(x={"$ref": "#/definitions/a~1b"}) | {"definitions": {"a/b": {"enum": ["q"]}}},
        {"x": "q"},
        {"x": "r"},
    ),
    "a definition further in": (
        object_of(x={"$defs": {"z": {"enum": ["q"]}}, "$ref": "#/properties/x/$defs/z"}),
        {"x": "q"},
        {"x": "r"},
    ),
    "with an id": (
        object_of(x=LINK) | {"$id": "https://example.com/a", "$defs": {"a": {"enum": ["q"]}}},
        {"x": "q"},
        {"x": "r"},
    ),
    "data that looks like one": (object_of(x={"enum": [LINK]}), {"x": LINK}, {"x": {"$ref": "#/$defs/1/$defs/a"}}),
    "a constant that looks like one": (
        object_of(x={"const": LINK}),
        {"x": LINK},
        {"x": {"$ref": "#/$defs/1/$defs/a"}},
    ),
    "a property of that name": (object_of(**{"$ref": {"enum": ["#"]}}), {"$ref": "#"}, {"$ref": "#/$defs/1"}),
    "a property named as a keyword": (
        object_of(enum={"$ref": "#/$defs/a"}) | {"$defs": {"a": {"enum": ["q"]}}},
        {"enum": "q"},
        {"enum": "r"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_references_lead_where_they_led_before_the_schemas_were_joined(case: str) -> None:
    schema, good, bad = CASES[case]
    jsonschema.Draft202012Validator({k: v for k, v in schema.items() if k != "$id"}).validate(good)
    joined = call_schema([("zero", {"type": "object"}), ("one", schema)], "arguments")
    grammar = Grammar("json_schema", json.dumps(joined))
    assert matches(grammar, good)
    assert not matches(grammar, bad)


def matches(grammar: Grammar, arguments: dict) -> bool:
    matcher = compiled(grammar, byte_tokenizer())
    text = list(json.dumps({"name": "one", "arguments": arguments}).encode())
    return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
