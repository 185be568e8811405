"""Reads replies of Anthropic's Messages API as chats' replies. Shares no code with the router's.

Knows nothing of what is right.
"""

from __future__ import annotations

import json

import orjson

from baton.drill.checks.chat import ChatReply, ChoiceMessage
from baton.drill.scenario import Request
from baton.protos.json import Json

REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def read_messages(request: Request, body: bytes) -> ChatReply:
    """Returns what a reply with status 200 held, streamed or not."""
    if request.over_http == "whole":
        whole = orjson.loads(body)
        blocks = [_block(block, json.dumps(block.get("input"))) for block in whole["content"]]
        return _reply(blocks, whole["stop_reason"], whole["usage"], True)
    return _streamed([_event(part) for part in body.decode().split("\n\n") if part])


def error_of(status: int, body: bytes) -> str:
    """Returns the type of the error that a reply is; "" for none."""
    return "" if status == 200 else str(orjson.loads(body)["error"]["type"])


def _event(part: str) -> Json:
    name, data = part.split("\n", 1)
    event: Json = orjson.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}", f"{name} is named otherwise in its data"
    return event


def _streamed(events: list[Json]) -> ChatReply:
    """Returns what a stream's events add up to; blocks come one after the other, each ended before the next."""
    blocks: list[Json] = []
    parts: list[str] = []
    in_order, is_open = True, False
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            in_order = in_order and not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            parts.append("")
            is_open = True
        elif kind == "content_block_delta" and is_open:
            in_order = in_order and event["index"] == len(blocks) - 1
            parts[-1] += next(text for name, text in event["delta"].items() if name != "type")
        elif kind == "content_block_delta":
            in_order = False
        elif kind == "content_block_stop":
            in_order, is_open = in_order and is_open, False
    told = [_block(block, part, part) for block, part in zip(blocks, parts, strict=True)]
    last: Json = next((event for event in events if event["type"] == "message_delta"), {"delta": {}, "usage": {}})
    error = next((event["error"]["type"] for event in events if event["type"] == "error"), "")
    kinds = [event["type"] for event in events]
    ended = kinds[-1:] == ["message_stop"] and kinds.count("message_delta") == 1 and not is_open and in_order
    return _reply(told, last["delta"].get("stop_reason"), last["usage"], ended)._replace(error=error)


def _block(block: Json, arguments: str, text: str | None = None) -> ChoiceMessage:
    """Returns a message of one block alone; ``text`` is a streamed block's."""
    kind = block["type"]
    if kind == "tool_use":
        return ChoiceMessage("", "", ((block["name"], arguments),))
    said = block[kind] if text is None else text
    return ChoiceMessage(said, "", ()) if kind == "thinking" else ChoiceMessage("", said, ())


def _reply(blocks: list[ChoiceMessage], reason: str | None, usage: Json, whole: bool) -> ChatReply:
    thought, content = "".join(one.thought for one in blocks), "".join(one.content for one in blocks)
    said = ChoiceMessage(thought, content, tuple(call for one in blocks for call in one.calls))
    read = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counts = {
        "prompt_tokens": sum(usage.get(name, 0) for name in read),
        "completion_tokens": usage.get("output_tokens"),
    }
    finish = [] if reason is None else [REASONS.get(reason, reason)]
    return ChatReply({0: said}, {}, {0: finish}, counts, "", whole)
