"""Structured output: the fields with which clients ask for it, converted to one ``Grammar``.

Knows nothing of models or sampling. OpenAI's ``response_format``, vLLM's ``structured_outputs`` and the older
``guided_*`` fields, SGLang's ``regex``, ``ebnf`` and ``json_schema``, Dynamo's ``nvext``; one of them at most.
"""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.protos.nouns import Grammar
from baton.router.api.body import Body
from baton.router.api.openai.schema_text import schema_text
from baton.router.api.request_body import RequestBody

ANY_OBJECT = '{"type": "object"}'
Schema = Json | str
Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]


class JsonSchemaFormat(Body):
    """Describes OpenAI's ``json_schema`` format; ``name``, ``description`` and ``strict`` have no effect: every
    answer follows the schema.
    """

    name: str | None = None
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """Describes the ``response_format`` of OpenAI's API.

    "text" is no constraint. ``schema`` beside the type is the form of SGLang and llama.cpp.
    """

    inside: ClassVar[str] = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _schema_fits_the_type(self) -> ResponseFormat:
        for name, given in (("json_schema", self.json_schema), ("schema", self.schema_)):
            fits = self.type == "json_schema" or (self.type == "json_object" and name == "schema")
            if given is not None and not fits:
                text = f"response_format.{name} can't go with type {self.type!r}: give type json_schema"
                raise InvalidRequest(text, "response_format.type")
        if self.json_schema is not None and self.schema_ is not None:
            text = "give one of response_format.json_schema and response_format.schema, not both"
            raise InvalidRequest(text, "response_format.schema")
        return self


class StructuredOutputs(RequestBody):
    """Describes vLLM's ``structured_outputs``: one of these fields.

    ``grammar`` is llama.cpp's GBNF or Lark. Raises InvalidRequest for any other key.
    """

    surface: ClassVar[str] = "structured_outputs"
    inside: ClassVar[str] = "structured_outputs."

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _every_key_is_known(self) -> StructuredOutputs:
        for name in self.ignored():
            text = f"{name} is not known: give json, json_object, regex, choice or grammar"
            raise InvalidRequest(text, name)
        return self


class NvExt(RequestBody):
    """Describes those of NVIDIA Dynamo's request extensions that equal a field of ours."""

    surface: ClassVar[str] = "nvext"
    inside: ClassVar[str] = "nvext."

    ignore_eos: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class ConstrainedBody(RequestBody):
    """Declares the fields that constrain an answer's form, except OpenAI's ``response_format``.

    ``ebnf`` is SGLang's name of ``guided_grammar``.
    """

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    nvext: NvExt | None = None

    def grammar(self) -> tuple[Grammar, str] | None:
        """Returns the grammar that the answer must match and the name of the field that asks for it, or None.

        Raises InvalidRequest for more than one.
        """
        found = {param: grammar for param, grammar in self._said() if grammar is not None}
        if len(found) > 1:
            raise InvalidRequest(f"give one of {' and '.join(found)}, not both", list(found)[1])
        return next(((grammar, param) for param, grammar in found.items()), None)

    def _said(self) -> list[tuple[str, Grammar | None]]:
        ours = self.structured_outputs or StructuredOutputs()
        theirs = self.nvext or NvExt()
        return [
            ("structured_outputs.json", _schema(ours.json_)),
            ("structured_outputs.json_object", Grammar("json_schema", ANY_OBJECT) if ours.json_object else None),
            ("structured_outputs.regex", _plain("regex", ours.regex)),
            ("structured_outputs.choice", _choice(ours.choice)),
            ("structured_outputs.grammar", _plain("grammar", ours.grammar)),
            *_guided("", self),
            *_guided("nvext.", theirs),
            ("json_schema", _schema(self.json_schema)),
            ("regex", _plain("regex", self.regex)),
            ("ebnf", _plain("grammar", self.ebnf)),
        ]


class StructuredBody(ConstrainedBody):
    """Declares all fields that constrain an answer's form, ``response_format`` included."""

    response_format: ResponseFormat | None = None

    def _said(self) -> list[tuple[str, Grammar | None]]:
        return [("response_format", _of_format(self.response_format)), *super()._said()]


def _of_format(said: ResponseFormat | None) -> Grammar | None:
    if said is None or said.type == "text":
        return None
    if said.schema_ is not None:
        return _schema(said.schema_)
    if said.type == "json_object":
        return Grammar("json_schema", ANY_OBJECT)
    if said.json_schema is None:
        text = "response_format.json_schema is missing: give it with a schema"
        raise InvalidRequest(text, "response_format.json_schema")
    return _schema(said.json_schema.schema_)


def _guided(inside: str, said: ConstrainedBody | NvExt) -> list[tuple[str, Grammar | None]]:
    return [
        (f"{inside}guided_json", _schema(said.guided_json)),
        (f"{inside}guided_regex", _plain("regex", said.guided_regex)),
        (f"{inside}guided_choice", _choice(said.guided_choice)),
        (f"{inside}guided_grammar", _plain("grammar", said.guided_grammar)),
    ]


def _schema(schema: Schema | None) -> Grammar | None:
    if schema is None:
        return None
    return Grammar("json_schema", schema if isinstance(schema, str) else schema_text(schema))


def _plain(kind: str, spec: str | None) -> Grammar | None:
    return None if spec is None else Grammar(kind, spec)


def _choice(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else Grammar("choice", json.dumps(choices, ensure_ascii=False))
