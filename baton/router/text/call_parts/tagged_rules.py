"""Writes the grammar of calls whose arguments stand one by one between tags, as bare text (``tagged_calls``).

Knows nothing of any one format. A tool's arguments come in the order of its schema. What a schema says of bare text
is held as far as a regular expression can say it; what it can't is refused, never left unheld.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from baton.protos.json import Json
from baton.router.text.call_parts.argument_types import STRING, TEXT, allowed_types, resolved
from baton.router.text.call_parts.tagged_calls import Tags
from baton.router.text.lazy_calls import CallSyntax, UnboundSchema, escaped, json_of

_SAID = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "deprecated"})
_OF_TOOL = _SAID | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$id"}
_OF_TEXT = _SAID | {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_CHAR = r"(.|\n)"
_NO_NAMES = "its required is no list of names"


def tagged_rules(tags: Tags, name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer of calls by ``tags`` amid free text (``lazy_calls.LazyRules``).

    Raises UnboundSchema for a schema that can't be held.
    """
    tools = "".join(
        "".join(_Tool(tags, syntax, at, f"{name}_tool_{at}").rules()) for at in range(len(syntax.tools))
    )
    any_tool = "(" + " | ".join(f"{name}_tool_{at}" for at in range(len(syntax.tools))) + ")"
    rules = f"{name}_call: {name}_open {any_tool}\n{tools}{syntax.free(name, before, tags.call)}"
    if not tags.section or syntax.special(tags.section) is None:
        return f"{name}: {name}_call* {name}_free\n{rules}"
    one, end = f"{syntax.mark(tags.call)} {any_tool}", syntax.mark(tags.section_end)
    section = f"{name}_free {syntax.mark(tags.section)} SPACE? ({one} SPACE?)+ {end}"
    return f"{name}: ({name}_call | {section})* {name}_free\n{rules}"


class _Tool:
    """Writes the rules of tool number ``at``, from its name to the end of the call; ``rule`` names the first."""

    def __init__(self, tags: Tags, syntax: CallSyntax, at: int, rule: str) -> None:
        self._tags, self._syntax, self._at, self._rule = tags, syntax, at, rule
        self._name, self._schema = syntax.tools[at]
        self._break = r"\n" if tags.trims else ""
        self._quote = '"' if tags.call.endswith("name=") else ""

    def rules(self) -> Iterator[str]:
        tags, schema = self._tags, self._schema
        closed = f"SPACE? {self._syntax.mark(tags.closed)}"
        name = json.dumps(f"{self._quote}{self._name}{self._quote}{tags.named}")
        if schema == {"type": "object"}:  # no strict tool
            yield f"{self._rule}: {name} (SPACE? {self._rule}_any)* {closed}\n"
            yield from self._any()
            return
        self._check(schema, _OF_TOOL, "its parameters")
        declared, required = schema.get("properties", {}), schema.get("required", [])
        self._require(isinstance(declared, dict), "its properties are no object")
        self._require(isinstance(required, list) and all(isinstance(key, str) for key in required), _NO_NAMES)
        properties = declared | {key: {} for key in required if key not in declared}
        keys = "".join(
            f" (SPACE? {self._rule}_{n}){'' if key in required else '?'}" for n, key in enumerate(properties)
        )
        yield f"{self._rule}: {name}{keys} {closed}\n"
        for n, (key, property_schema) in enumerate(properties.items()):
            yield from self._property(f"{self._rule}_{n}", key, property_schema)

    def _property(self, rule: str, key: str, schema: object) -> Iterator[str]:
        found = resolved(schema, self._schema)
        quoted = f"{self._quote}{key}{self._quote}"
        head = f"{self._syntax.mark(self._tags.key)} {json.dumps(quoted)} {self._keyed}"
        types = allowed_types(found, self._schema)
        if types and STRING not in types:
            yield f"{rule}: {head} {self._line} {self._json(key, found)} {self._line} {self._end}\n"
            return
        if isinstance(found, dict) and ("enum" in found or "const" in found):
            values = found["enum"] if "enum" in found else [found["const"]]
            self._require(
                isinstance(values, list) and bool(values), f"its parameter {key!r} has an enum of nothing"
            )
            options = " | ".join(json.dumps(v if isinstance(v, str) else json.dumps(v)) for v in values)
            yield f"{rule}: {head} {self._line} ({options}) {self._line} {self._end}\n"
            return
        yield f"{rule}: {head} {self._line} {rule.upper()}{self._split_end}\n"
        yield f"{rule.upper()}: {self._text(key, found, types)}\n"

    def _text(self, key: str, schema: object, types: frozenset[str]) -> str:
        """Returns the terminal of a bare text that ``schema`` allows, up to and with its end."""
        where = f"its parameter {key!r}"
        if not isinstance(schema, dict):
            return self._until_end(f"{_CHAR}*")
        self._check(schema, _OF_TEXT | ({"anyOf", "oneOf"} if types != TEXT else frozenset()), where)
        if types - {STRING, "null", "boolean", "integer", "number"}:
            raise UnboundSchema(self._at, f"{where} may be text or an object, which this format writes alike")
        least, most, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
        whole = all(n is None or (isinstance(n, int) and n >= 0) for n in (least, most))
        self._require(whole, f"{where} has a length that is no whole number from 0 on")
        bounds = [f"{_CHAR}{{{least or 0:d},{'' if most is None else int(most)}}}"]
        return self._until_end(*bounds, *([_anchored(pattern)] if isinstance(pattern, str) else []))

    def _until_end(self, *bounds: str) -> str:
        """Returns the terminal of a text that matches every regular expression of ``bounds``, with its end where
        that is text: a lexeme that left the end to the next one would go on over it.
        """
        end = escaped(self._tags.end)
        line = self._break + ("" if self._split_end else end)
        once = f"~/{_CHAR}*{end}{_CHAR}{'*' if self._split_end else '+'}/"
        return " & ".join([*(f"/{bound}{line}/" for bound in bounds), once])

    def _any(self) -> Iterator[str]:
        """Yields the rule of an argument of any name and text."""
        key = rf'{self._quote}[^<>"\n]{{1,64}}{self._quote}'
        head, text = f"{self._syntax.mark(self._tags.key)} /{key}/ {self._keyed}", f"{self._rule}_any".upper()
        yield f"{self._rule}_any: {head} {self._line} {text}{self._split_end}\n"
        yield f"{text}: {self._until_end(f'{_CHAR}*')}\n"

    def _json(self, key: str, schema: object) -> str:
        assert isinstance(schema, dict)
        definitions: Json = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        if any(not ref.startswith(("#/$defs/", "#/definitions/")) for ref in _references(schema)):
            raise UnboundSchema(self._at, f"its parameter {key!r} refers to something outside of $defs")
        return json_of({**schema, **definitions})

    def _require(self, holds: bool, why: str) -> None:
        if not holds:
            raise UnboundSchema(self._at, why)

    def _check(self, schema: Json, known: frozenset[str] | set[str], where: str) -> None:
        unknown = sorted(schema.keys() - known)
        if unknown:
            raise UnboundSchema(self._at, f"{where} has {unknown[0]!r}, to which bare text can't be held")

    @property
    def _keyed(self) -> str:
        keyed = self._syntax.mark(self._tags.keyed)
        return f"{keyed} SPACE? {self._syntax.mark(self._tags.value)}" if self._tags.value else keyed

    @property
    def _line(self) -> str:
        return json.dumps("\n") if self._tags.trims else ""

    @property
    def _end(self) -> str:
        return self._syntax.mark(self._tags.end)

    @property
    def _split_end(self) -> str:
        """Returns what ends a text as a token of its own; "" where the end is text, too."""
        return "" if self._syntax.special(self._tags.end) is None else f" {self._end}"


def _anchored(pattern: str) -> str:
    """Returns the regular expression of texts in which JSON schema finds ``pattern``."""
    begin = "" if pattern.startswith("^") else f"{_CHAR}*"
    end = "" if pattern.endswith("$") else f"{_CHAR}*"
    return f"{begin}({pattern.removeprefix('^').removesuffix('$').replace('/', chr(92) + '/')}){end}"


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
