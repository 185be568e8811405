"""Writes the grammar of calls whose arguments stand one by one between tags, as bare text (``tagged_calls``).

Knows nothing of any one format. A tool's arguments come in the order of its schema. What a schema says of bare text
is held as far as a regular expression can say it; what it can't is refused, never left unheld.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from baton.protos.json import Json
from baton.router.text.call_parts.argument_types import STRING, allowed_types, resolved
from baton.router.text.call_parts.tagged_calls import Tags
from baton.router.text.call_parts.text_forms import CHAR, SAID, TextForm, UnheldText, text_forms
from baton.router.text.lazy_calls import CallSyntax, UnboundSchema, escaped, json_of

_OF_TOOL = SAID | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$id"}
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
        if isinstance(schema, dict) and "$ref" in schema:
            self._check(schema, SAID | {"$ref"}, f"its parameter {key!r}")
        found = resolved(schema, self._schema)
        quoted = f"{self._quote}{key}{self._quote}"
        head = f"{self._syntax.mark(self._tags.key)} {json.dumps(quoted)} {self._keyed}"
        types = allowed_types(found, self._schema)
        if types and STRING not in types:
            yield f"{rule}: {head} {self._line} {self._json(key, found)} {self._line} {self._end}\n"
            return
        forms = self._forms(key, schema)
        if not any(form.bounds for form in forms):
            options = " | ".join(json.dumps(value) for form in forms for value in form.values)
            yield f"{rule}: {head} {self._line} ({options}) {self._line} {self._end}\n"
            return
        yield f"{rule}: {head} {self._line} {rule.upper()}{self._split_end}\n"
        yield f"{rule.upper()}: {' | '.join(self._texts(forms))}\n"

    def _forms(self, key: str, schema: object) -> list[TextForm]:
        try:
            return text_forms(schema, self._schema)
        except UnheldText as error:
            raise UnboundSchema(self._at, f"its parameter {key!r} {error}") from None

    def _texts(self, forms: list[TextForm]) -> Iterator[str]:
        """Yields the terminals of bare texts of ``forms``, up to and with their end."""
        line = "\n" if self._tags.trims else ""
        end = line + ("" if self._split_end else self._tags.end)
        for form in forms:
            yield from (json.dumps(value + end) for value in form.values)
            if form.bounds:
                yield f"({self._until_end(*form.bounds)})"

    def _until_end(self, *bounds: str) -> str:
        """Returns the terminal of a text that matches every regular expression of ``bounds``, with its end where
        that is text: a lexeme that left the end to the next one would go on over it.
        """
        end = escaped(self._tags.end)
        line = self._break + ("" if self._split_end else end)
        once = f"~/{CHAR}*{end}{CHAR}{'*' if self._split_end else '+'}/"
        return " & ".join([*(f"/{bound}{line}/" for bound in bounds), once])

    def _any(self) -> Iterator[str]:
        """Yields the rule of an argument of any name and text."""
        key = rf'{self._quote}[^<>"\n]{{1,64}}{self._quote}'
        head, text = f"{self._syntax.mark(self._tags.key)} /{key}/ {self._keyed}", f"{self._rule}_any".upper()
        yield f"{self._rule}_any: {head} {self._line} {text}{self._split_end}\n"
        yield f"{text}: {self._until_end(f'{CHAR}*')}\n"

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


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
