"""Tests that a call which a stop string cuts is not said to be one that can be made."""

from __future__ import annotations

import json

import pytest

from baton.router.text.chat_reader import AnswerFormat
from baton.router.text.tool_parsers import hermes
from tests.router.conftest import EOS

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '{"name": "weather", "arguments": {"at": "Ulm", "day": 12}}'


def asked(fake, tokenizer, text: str, stop: str) -> dict[str, object]:
    """Has the worker write ``text``; returns a chat with a tool and the stop string that asks for it."""
    ids = [*tokenizer.encode(text, False), EOS]
    fake.say = lambda request, choice: ids
    return {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "stop": [stop]}


@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [
        ("day", '{"at": "Ulm", "', "stop"),
        ("2}", '{"at": "Ulm", "day": 1', "stop"),
        ('{"at', "", "stop"),
        ("</tool_call>", '{"at": "Ulm", "day": 12}', "tool_calls"),
        ("done", '{"at": "Ulm", "day": 12}', "tool_calls"),
        ("nowhere", '{"at": "Ulm", "day": 12}', "tool_calls"),
    ],
)
async def test_a_call_that_a_stop_string_cuts_is_no_reason_to_make_it(
    router, fake, tokenizer, stop: str, arguments: str, reason: str
) -> None:
    ask = asked(fake, tokenizer, f"<tool_call>{CALL}</tool_call>done", stop)
    answer = await router.openai.chat.completions.create(**ask)
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (call.function.arguments, choice.finish_reason) == (arguments, reason)
    reasons = [
        c.choices[0].finish_reason async for c in await router.openai.chat.completions.create(**ask, stream=True)
    ]
    assert reasons[-1] == reason
    theirs = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": ask["messages"],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "stop_sequences": [stop],
    }
    message = (await router.http.post("/v1/messages", json=theirs)).json()
    block = message["content"][0]
    if reason == "stop":
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    else:
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
        assert block["input"] == json.loads(arguments)


@pytest.mark.parametrize(
    ("text", "stop", "reason"),
    [
        ('<tool_call>{"name": "weather"}</tool_call>', "</tool_call>", "tool_calls"),
        ('<tool_call>{"name": "weather", "arguments": ""}</tool_call>done', "done", "tool_calls"),
        ('<tool_call>{"name": "weather", "argu', "argu", "stop"),
    ],
)
async def test_a_call_without_arguments_is_whole_where_its_json_is(
    router, fake, tokenizer, text: str, stop: str, reason: str
) -> None:
    ask = asked(fake, tokenizer, text, stop)
    answer = await router.openai.chat.completions.create(**ask)
    assert answer.choices[0].finish_reason == reason


def test_arguments_that_nest_too_deep_to_be_read_are_cut_where_the_call_is_open() -> None:
    deep = '<tool_call>{"name": "weather", "arguments": {"a": ' + 5000 * "["
    for text, reason in ((deep, "stop"), (deep + 5000 * "]" + "}}</tool_call>", "tool_calls")):
        reader = AnswerFormat(tools=hermes.make).reader()
        reader.push(text)
        reader.flush()
        assert reader.finish_reason("stop", "zz") == reason
