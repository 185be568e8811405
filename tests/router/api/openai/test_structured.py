"""Tests what clients may ask of an answer's form, and what becomes of a bad ask, over REST."""

from __future__ import annotations

import json

import pytest

from baton.protos.errors import InvalidRequest
from baton.protos.nouns import Grammar
from baton.router.answer.grammar_check import GrammarCheck
from baton.router.api.openai import schema_text
from baton.router.api.openai.schemas import ChatBody

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}'


def json_schema(schema: dict) -> dict:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    }


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}')),
        (json_schema(SCHEMA), Grammar("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type": "object"}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "é"]}}, Grammar("choice", '["a", "é"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("grammar", 'root ::= "a"')),
        ({"guided_json": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_regex": "[0-9]"}, Grammar("regex", "[0-9]")),
        ({"guided_choice": ["x"]}, Grammar("choice", '["x"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
    ],
)
async def test_each_way_to_ask_for_a_form_reaches_dispatch_as_one_grammar(router, fake, fields, grammar) -> None:
    assert (await router.http.post("/v1/chat/completions", json=CHAT | fields)).status_code == 200
    assert (await router.http.post("/v1/completions", json={"prompt": "x"} | fields)).status_code == 200
    assert [request.sampling.grammar for request in fake.requests] == [grammar, grammar]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        (json_schema({"type": "nonsense"}), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 200}, "bad_words"),
    ],
)
async def test_a_bad_form_is_a_400_that_names_its_field(start_router, fake, model_dir, fields, param) -> None:
    async with start_router(fake, {"tiny": model_dir}) as clients:
        response = await clients.http.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert fake.requests == []


async def test_the_clients_own_parse_helper_works(router, fake, tokenizer) -> None:
    from pydantic import BaseModel

    class Fruit(BaseModel):
        name: str
        count: int

    said = [*tokenizer.encode('{"name": "fig", "count": 3}', False), 1]
    fake.say = lambda request, choice: said
    answer = await router.openai.chat.completions.parse(
        model="tiny", messages=CHAT["messages"], response_format=Fruit, temperature=0
    )
    assert answer.choices[0].message.parsed == Fruit(name="fig", count=3)
    assert fake.requests[0].sampling.grammar.kind == "json_schema"


async def test_bad_words_and_allowed_tokens_reach_dispatch_as_ids(router, fake, tokenizer) -> None:
    body = CHAT | {"bad_words": ["fox"], "allowed_token_ids": [7, 8]}
    assert (await router.http.post("/v1/chat/completions", json=body)).status_code == 200
    sampling = fake.requests[0].sampling
    assert sampling.allowed_token_ids == (7, 8)
    assert {tokenizer.decode(word) for word in sampling.bad_words} == {"fox", " fox"}


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("schema", "says"),
    [(nested(900), "recursion limit"), ({"enum": [f"v{i}" for i in range(60_000)]}, "over 65536 bytes")],
    ids=["deep", "long"],
)
async def test_a_schema_too_long_or_too_deep_is_refused_by_name_and_never_written_out(
    monkeypatch, schema: dict, says: str
) -> None:
    tool = {"type": "function", "function": TOOL["function"] | {"parameters": schema}}
    asked = {
        "guided_json": {"guided_json": schema},
        "response_format": json_schema(schema),
        "tools": {"tools": [tool], "tool_choice": "required"},
    }
    written: list[object] = []
    monkeypatch.setattr(schema_text.json, "dumps", written.append)
    found = {param: ChatBody.model_validate(CHAT | fields).grammar() for param, fields in asked.items()}
    monkeypatch.undo()
    assert written == []
    for param, (grammar, named) in found.items():
        assert named == param
        with pytest.raises(InvalidRequest, match=says):
            await GrammarCheck().check(grammar, param)


def test_a_schema_of_any_size_that_may_be_followed_is_written_as_it_is() -> None:
    for schema in ({}, nested(200), {"enum": ["x" * 10] * 2000}):
        assert json.loads(schema_text.schema_text(schema)) == schema
