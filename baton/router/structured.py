"""Structured output: the ways in which clients ask for it -> one ``Grammar``, checked before anything is queued.

Knows nothing of models or sampling. OpenAI's ``response_format``, vLLM's ``structured_outputs`` and the older
``guided_*`` fields; one of them at most.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.protos.errors import InvalidRequest, Overloaded
from baton.protos.grammar import byte_tokenizer, compiled
from baton.protos.nouns import Grammar
from baton.router.body import Body

ANY_OBJECT = '{"type": "object"}'
KNOWN_GRAMMARS = 256
MOST_WAITING = 64
Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]


class JsonSchemaFormat(Body):
    """``name``, ``description`` and ``strict`` change nothing here: every answer follows the schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's. "text" is no constraint."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's: one of these. ``grammar`` is EBNF in llama.cpp's GBNF or in Lark."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class StructuredBody(Body):
    """The fields that constrain an answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def grammar(self) -> tuple[Grammar, str] | None:
        """What the answer must match and the field that says so. Raises InvalidRequest for two of them."""
        found = {param: grammar for param, grammar in self._said() if grammar is not None}
        if len(found) > 1:
            raise InvalidRequest(f"give one of {' and '.join(found)}, not both", list(found)[1])
        return next(((grammar, param) for param, grammar in found.items()), None)

    def _said(self) -> list[tuple[str, Grammar | None]]:
        ours = self.structured_outputs or StructuredOutputs()
        return [
            ("response_format", _of_format(self.response_format)),
            ("structured_outputs.json", _schema(ours.json_)),
            ("structured_outputs.json_object", Grammar("json_schema", ANY_OBJECT) if ours.json_object else None),
            ("structured_outputs.regex", _plain("regex", ours.regex)),
            ("structured_outputs.choice", _choice(ours.choice)),
            ("structured_outputs.grammar", _plain("grammar", ours.grammar)),
            ("guided_json", _schema(self.guided_json)),
            ("guided_regex", _plain("regex", self.guided_regex)),
            ("guided_choice", _choice(self.guided_choice)),
            ("guided_grammar", _plain("grammar", self.guided_grammar)),
        ]


class GrammarCheck:
    """Says early what an engine would say late: compiles a grammar once, in a thread, against bytes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer = byte_tokenizer()
        self._known: OrderedDict[Grammar, InvalidRequest | None] = OrderedDict()
        self._waiting = 0

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises InvalidRequest naming ``param`` and why; Overloaded when too many wait for their check."""
        if grammar not in self._known:
            verdict = await self._judge(grammar)
            self._known[grammar] = verdict
            if len(self._known) > KNOWN_GRAMMARS:
                self._known.popitem(last=False)
        error = self._known.get(grammar)
        if error is not None:
            raise InvalidRequest(f"{param}: {error.message}", param)

    async def _judge(self, grammar: Grammar) -> InvalidRequest | None:
        if self._waiting >= MOST_WAITING:
            raise Overloaded("too many new grammars wait for their check", retry_after_s=1.0)
        self._waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, compiled, grammar, self._tokenizer)
        except InvalidRequest as error:
            return error
        finally:
            self._waiting -= 1
        return None


def _of_format(said: ResponseFormat | None) -> Grammar | None:
    if said is None or said.type == "text":
        return None
    if said.type == "json_object":
        return Grammar("json_schema", ANY_OBJECT)
    if said.json_schema is None:
        text = "response_format.json_schema is missing: give it with a schema"
        raise InvalidRequest(text, "response_format.json_schema")
    return _schema(said.json_schema.schema_)


def _schema(schema: Schema | None) -> Grammar | None:
    if schema is None:
        return None
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def _plain(kind: str, spec: str | None) -> Grammar | None:
    return None if spec is None else Grammar(kind, spec)


def _choice(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else Grammar("choice", json.dumps(choices, ensure_ascii=False))
