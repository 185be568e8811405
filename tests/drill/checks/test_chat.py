"""Tests what the judge of chats holds a reply over HTTP against."""

from __future__ import annotations

import json

import msgspec

from baton.drill.checks.chat import ChoiceMessage, read_chat, said_of, wrong_chat
from baton.drill.checks.text import AnswerText
from baton.drill.language.vocabulary import PIECES
from baton.drill.scenario import Request
from baton.protos.json import Json
from baton.protos.nouns import Grammar, Sampling

CHAT = Request(0, 0.0, (1, 2), Sampling(max_tokens=8), over_http="whole", messages=("so",), tools="auto")
LOOK, GO = (PIECES[at].decode() for at in (-2, -1))
LOOKED = ("look", '{"at": 1}')


def reply(message: Json, finish: str) -> bytes:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def test_thoughts_content_and_calls_are_told_apart() -> None:
    assert said_of(CHAT, f"a{LOOK}\n\n{LOOK} b") == ChoiceMessage("", "a b", (LOOKED, LOOKED))
    assert said_of(CHAT, f"a{LOOK[:-1]}") == ChoiceMessage("", "a", (LOOKED,))  # cut by a stop string
    assert said_of(CHAT, f"\n<think>\nso</think>\n\nyes{LOOK}") == ChoiceMessage("so", "yes", (LOOKED,))
    assert said_of(CHAT, f"<think>so{LOOK}") == ChoiceMessage(f"so{LOOK}", "", ())
    assert said_of(CHAT, f"a <think>b</think>{GO}").calls[0][0] == "go"


def test_a_prompt_may_open_the_thought_and_a_grammar_leaves_none() -> None:
    opened = msgspec.structs.replace(CHAT, thinks=True, tools="")
    assert said_of(opened, "so</think>yes") == ChoiceMessage("so", "yes", ())
    bound = msgspec.structs.replace(opened, sampling=Sampling(grammar=Grammar("regex", ".")))
    assert said_of(bound, "so</think>yes") == ChoiceMessage("", "so</think>yes", ())


def test_a_demanded_call_may_end_anywhere() -> None:
    named, required = (msgspec.structs.replace(CHAT, tools=tools) for tools in ("named", "required"))
    assert said_of(named, '{"at": [1') == ChoiceMessage("", "", (("look", '{"at": [1'),))
    assert said_of(required, '[{"name": "look"') == ChoiceMessage("", "", ())
    assert said_of(required, '[{"name": "look", ') == ChoiceMessage("", "", (("look", ""),))
    whole = '[{"name": "look", "parameters": {"at": [1]}}, {"name": "go", "parameters": {"to": "2"'
    assert said_of(required, whole).calls == (("look", '{"at": [1]}'), ("go", '{"to": "2"'))


def test_a_message_as_the_oracle_says_is_right_and_each_other_one_is_wrong() -> None:
    want = [AnswerText(f"<think>so</think>a{LOOK}", 3, "stop")]
    function = {"name": "look", "arguments": '{"at":1}'}
    right: Json = {"content": "a", "reasoning_content": "so", "tool_calls": [{"id": "1", "function": function}]}
    assert not list(wrong_chat(CHAT, read_chat(CHAT, reply(right, "tool_calls")), want))
    others = ({"content": "b"}, {"reasoning_content": None}, {"tool_calls": []})
    for other in (*(reply(right | changed, "tool_calls") for changed in others), reply(right, "stop")):
        assert list(wrong_chat(CHAT, read_chat(CHAT, other), want))


def test_a_stream_adds_up_to_the_message() -> None:
    streamed = msgspec.structs.replace(CHAT, over_http="stream")
    begun = {"index": 0, "id": "1", "function": {"name": "look", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": '{"at": 1}'}}
    deltas = [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"tool_calls": [begun]},
        {"tool_calls": [rest]},
    ]
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices += [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}]
    events = [{"choices": [choice]} for choice in choices]
    events += [{"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    want = [AnswerText(f"a{LOOK}", 3, "stop")]
    assert not list(wrong_chat(streamed, read_chat(streamed, body), want))
    assert list(wrong_chat(streamed, read_chat(streamed, body.removesuffix(b"data: [DONE]\n\n")), want))
