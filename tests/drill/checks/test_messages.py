"""Tests what the judge of chats reads of replies of Anthropic's Messages API."""

from __future__ import annotations

import json

import msgspec

from baton.drill.checks.chat import ChoiceMessage, wrong_chat
from baton.drill.checks.messages import read_messages
from baton.drill.checks.text import AnswerText
from baton.drill.language.vocabulary import PIECES
from baton.drill.scenario import Request
from baton.protos.json import Json
from baton.protos.nouns import Sampling

ASKED = Request(
    0, 0.0, (1, 2), Sampling(max_tokens=8), over_http="stream", messages=("so",), tools="auto", anthropic=True
)
LOOK = PIECES[-2].decode()
WANT = [AnswerText(f"<think>so</think>a{LOOK}", 3, "stop")]
USAGE = {"input_tokens": 1, "cache_read_input_tokens": 1, "output_tokens": 3}


def block(index: int, begun: Json, *parts: Json) -> list[Json]:
    deltas = [{"type": "content_block_delta", "index": index, "delta": part} for part in parts]
    begin = {"type": "content_block_start", "index": index, "content_block": begun}
    return [begin, *deltas, {"type": "content_block_stop", "index": index}]


BLOCKS = [
    block(0, {"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "so"}),
    block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "a"}),
    block(
        2,
        {"type": "tool_use", "name": "look", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"at":'},
        {"type": "input_json_delta", "partial_json": "1}"},
    ),
]
END: list[Json] = [
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": USAGE},
    {"type": "message_stop"},
]


def stream(events: list[Json]) -> bytes:
    return "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events).encode()


def test_a_stream_of_blocks_is_the_oracles_message_and_others_are_wrong() -> None:
    events = [event for each in BLOCKS for event in each] + END
    reply = read_messages(ASKED, stream(events))
    assert reply.said[0] == ChoiceMessage("so", "a", (("look", '{"at":1}'),))
    assert not list(wrong_chat(ASKED, reply, WANT))
    for others in (events[1:], events[:-1], events[:2] + events[3:], [*events[:-2], END[0], *END]):
        assert list(wrong_chat(ASKED, read_messages(ASKED, stream(others)), WANT))


def test_a_whole_message_is_read_and_a_call_that_was_cut_off_may_tell_any_input() -> None:
    whole = msgspec.structs.replace(ASKED, over_http="whole", tools="named")
    told = {"content": [{"type": "tool_use", "name": "look", "input": {"at": [1]}}], "stop_reason": "max_tokens"}
    reply = read_messages(whole, json.dumps(told | {"usage": USAGE}).encode())
    assert not list(wrong_chat(whole, reply, [AnswerText('{"at": [1', 3, "length")]))
    assert list(wrong_chat(whole, reply, [AnswerText('{"at": [2]}', 3, "length")]))
