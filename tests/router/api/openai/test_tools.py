"""Tool calling and reasoning over REST, with the unmodified client: offered, demanded, streamed, told apart."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from baton.protos.grammar import byte_tokenizer, compiled
from baton.router.api.openai.schemas import ChatBody
from tests.router.conftest import EOS

MESSAGES = [{"role": "user", "content": "Weather?"}]
POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/place"}, "unit": {"enum": ["C", "F"]}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "maxLength": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": POINT}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "tools": TOOLS}


@pytest.fixture
def says(fake, tokenizer):
    """Makes the model say a text and end."""

    def say(text: str) -> None:
        ids = [*tokenizer.encode(text, False), EOS]
        fake.say = lambda request, choice: ids

    return say


async def streamed(client, **ask) -> tuple[str, str, list[dict], list[str]]:
    """Content, thought, calls and finish reasons of a stream, put together as clients do."""
    content = thought = ""
    calls: list[dict] = []
    reasons = []
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, thought, calls, reasons


async def test_calls_in_the_models_own_format_become_tool_calls(router, says) -> None:
    says(
        'Let me see.<tool_call>{"name": "weather", "arguments": {"at": "Ulm"}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    answer = await router.openai.chat.completions.create(**ASK)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "now"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"at": "Ulm"}
    assert len({call.id for call in choice.message.tool_calls}) == 2
    content, _, calls, reasons = await streamed(router.openai, **ASK)
    assert (content, reasons) == ("Let me see.", ["tool_calls"])
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ]


async def test_without_parallel_calls_only_the_first_counts(router, says) -> None:
    says('<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2)
    answer = await router.openai.chat.completions.create(**ASK, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].message.content is None


STRICT = {"type": "function", "function": {"name": "now", "strict": True, "parameters": POINT}}


@pytest.mark.parametrize(("choice", "bound"), [(None, True), ("auto", True), ("none", False)])
async def test_a_strict_tool_binds_what_the_model_opens_as_a_call(router, fake, choice, bound) -> None:
    chat = {"model": "tiny", "messages": MESSAGES, "tools": [TOOLS[0], STRICT], "tool_choice": choice}
    answer = await router.http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    assert "x-baton-ignored" not in answer.headers
    grammar = fake.requests[-1].sampling.grammar
    assert (grammar is not None) == bound
    flat = {"type": "function", **STRICT["function"]}
    response = await router.http.post("/v1/responses", json={"input": "x", "tools": [flat], "tool_choice": choice})
    assert response.status_code == 200, response.text
    assert "x-baton-ignored" not in response.headers
    if grammar is None:
        return
    matcher = compiled(grammar, byte_tokenizer())
    good = b'Hm. <tool_call>{"name": "now", "arguments": {"at": "Ulm"}}</tool_call>'
    free = b'<tool_call>{"name": "weather", "arguments": {"at": 3}}</tool_call>'  # this one isn't strict
    assert matcher.consume_tokens(list(good + free))
    bad = b'<tool_call>{"name": "now", "arguments": {"at": 3'
    assert matcher.try_consume_tokens(list(bad)) == len(bad) - 1


@pytest.mark.parametrize("fields", [{"response_format": {"type": "json_object"}}, {"allowed_token_ids": [5]}])
async def test_a_strict_that_nothing_holds_is_named_in_the_header(router, fields) -> None:
    chat = {"model": "tiny", "messages": MESSAGES, "tools": [TOOLS[0], STRICT], **fields}
    answer = await router.http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored"] == "tools.1.function.strict"


async def test_none_offers_nothing_and_reads_nothing(router, says) -> None:
    says("<tool_call>{}</tool_call>")
    answer = await router.openai.chat.completions.create(**ASK, tool_choice="none")
    assert answer.choices[0].message.content == "<tool_call>{}</tool_call>"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


async def test_a_named_tool_is_demanded_by_grammar_and_the_answer_is_its_arguments(router, fake, says) -> None:
    says('{"at": "Ulm"}')
    named = {"type": "function", "function": {"name": "weather"}}
    answer = await router.openai.chat.completions.create(**ASK, tool_choice=named)
    assert json.loads(fake.requests[0].sampling.grammar.spec) == POINT
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"at": "Ulm"}')
    _, _, calls, reasons = await streamed(router.openai, **ASK, tool_choice=named)
    assert (calls[0]["arguments"], reasons) == ('{"at": "Ulm"}', ["tool_calls"])


async def test_required_demands_an_array_of_calls(router, fake, says) -> None:
    says('[{"name": "weather", "parameters": {"at": "Ulm"}}, {"name": "now", "parameters": {}}]')
    answer = await router.openai.chat.completions.create(**ASK, tool_choice="required")
    assert [(c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls] == [
        ("weather", '{"at": "Ulm"}'),
        ("now", "{}"),
    ]
    assert answer.choices[0].message.content is None
    _, _, calls, _ = await streamed(router.openai, **ASK, tool_choice="required")
    assert [call["name"] for call in calls] == ["weather", "now"]
    assert fake.requests[0].sampling.grammar.kind == "json_schema"


def test_the_demanded_grammar_holds_each_tools_own_definitions() -> None:
    body = ChatBody.model_validate(
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    )
    grammar = body.forced_grammar()
    assert grammar is not None
    schema = json.loads(grammar.spec)
    good = [{"name": "weather", "parameters": {"at": "Ulm", "unit": "C"}}]
    jsonschema.validate(good, schema)
    for bad in ([], good * 2, [{"name": "weather", "parameters": {"at": 3}}], [{"name": "x", "parameters": {}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    matcher = compiled(grammar, byte_tokenizer())
    assert matcher.consume_tokens(list(b'[{"name":"weather","parameters":{"at":"Ulm"}}]'))
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{}]}, "functions"),
    ],
)
async def test_a_bad_tool_is_a_400_that_names_it(router, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await router.openai.chat.completions.create(**(ASK | {"extra_body": fields}))
    assert bad.value.param == param


@pytest.mark.parametrize(
    "said", [{"function_call": {"name": "f", "arguments": "{}"}}, {"refusal": "No."}, {"audio": {"id": "x"}}]
)
async def test_what_no_template_shows_of_an_earlier_answer_is_refused_by_name(router, said) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": None, **said}, *MESSAGES]
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(said))} of an earlier answer") as bad:
        await router.openai.chat.completions.create(model="tiny", messages=messages)
    assert bad.value.param == "messages[1]"
    for nothing in (None, type(next(iter(said.values())))()):
        absent = dict.fromkeys(said, nothing) | {"role": "assistant", "content": "So."}
        answer = await router.openai.chat.completions.create(model="tiny", messages=[*MESSAGES, absent, *MESSAGES])
        assert answer.choices


async def test_a_conversation_with_calls_reaches_the_template_with_arguments_as_objects(
    start_router, fake, model_dir, tmp_path, tokenizer
) -> None:
    template = (
        "{% if tools %}{{ tools[0].function.name }};{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }}{% endfor %};{% endfor %}"
    )
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Ulm"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "fine"},
    ]
    async with start_router(fake, {"tiny": tmp_path}) as clients:
        await clients.openai.chat.completions.create(**ASK | {"messages": messages, "max_tokens": 1})
    text = tokenizer.decode(fake.requests[0].token_ids)
    assert text == "weather;user:Weather?;assistant:Ulm;tool:fine;"


async def test_a_thought_is_kept_apart_streamed_and_whole(start_router, fake, model_dir, says) -> None:
    says("<think>\nHm.\n</think>\n\nSunny.")
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    async with start_router(fake, {"tiny": model_dir}, reasoning_parser="think") as clients:
        message = (await clients.openai.chat.completions.create(**ask)).choices[0].message
        hidden = await clients.openai.chat.completions.create(**ask, extra_body={"include_reasoning": False})
        content, thought, _, reasons = await streamed(clients.openai, **ask)
    assert (message.content, message.reasoning_content) == ("Sunny.", "Hm.\n")
    assert (content, thought, reasons) == ("Sunny.", "Hm.\n", ["stop"])
    assert hidden.choices[0].message.content == "Sunny."
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


WRONG = {"type": "function", "function": {"name": "wrong", "parameters": {"type": "objekt"}, "strict": True}}


@pytest.mark.parametrize(
    ("choice", "tools", "at"),
    [
        ("auto", [STRICT, WRONG], 1),
        ("required", [TOOLS[0], TOOLS[1], WRONG], 2),
        ({"type": "function", "function": {"name": "wrong"}}, [WRONG], 0),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_named_with_the_reason_alone(router, choice, tools, at) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": choice}
    refused = await router.http.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    error, field = refused.json()["error"], f"tools[{at}].function.parameters"
    assert error["param"] == field
    assert error["message"] == f"{field}: the grammar can't be followed: Invalid type: objekt"
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    asked = {"model": "tiny", "input": "Weather?", "tools": flat}
    if choice == "auto":
        refused = await router.http.post("/v1/responses", json=asked)
        assert refused.json()["error"]["param"] == f"tools[{at}].parameters"


async def test_a_refused_grammar_is_not_quoted(router) -> None:
    for spec in ('start: "' + "x" * 3000 + '" b\n', "start: a\n" + "#\n" * 50 + "a: /" + "([" * 3000 + "/\n"):
        asked = {"model": "tiny", "prompt": "a", "guided_grammar": spec}
        refused = (await router.http.post("/v1/completions", json=asked)).json()["error"]
        assert refused["param"] == "guided_grammar"
        assert len(refused["message"]) < 600
    assert (
        "unknown name"
        in (
            await router.http.post(
                "/v1/completions", json={"model": "tiny", "prompt": "a", "guided_grammar": 'start: "a" b'}
            )
        ).text
    )
