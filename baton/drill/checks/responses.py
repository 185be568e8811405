"""Reads replies of OpenAI's Responses API as chats' replies, and holds a stream's events against one another.

Shares no code with the router's. Knows nothing of what a model must say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson

from baton.drill.checks.chat import ChatReply, ChoiceMessage
from baton.drill.scenario import Request
from baton.protos.json import Json

OPENING = ["response.created", "response.in_progress"]
LAST = ("response.completed", "response.incomplete")
DELTAS = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}


def read_responses(request: Request, body: bytes) -> ChatReply:
    """Returns what a reply with status 200 held, streamed or not."""
    if request.over_http == "whole":
        return _reply(orjson.loads(body), True)
    events = [_event(part) for part in body.decode().split("\n\n") if part]
    error = next((str(event["code"]) for event in events if event["type"] == "error"), "")
    last: Json = events[-1] if events else {"type": ""}
    if error or last["type"] not in LAST:
        return ChatReply({}, {}, {}, None, error, False)
    return _reply(last["response"], not list(_disorder(events)))


def _event(part: str) -> Json:
    name, data = part.split("\n", 1)
    event: Json = orjson.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}", f"{name} is named otherwise in its data"
    return event


def _reply(response: Json, whole: bool) -> ChatReply:
    """Returns what a whole response says."""
    thought = content = ""
    calls = []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            thought += _text(item)
        else:
            content += _text(item)
    finish = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    usage = response["usage"]
    counts = {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]}
    whole = whole and usage["total_tokens"] == sum(counts.values())
    return ChatReply({0: ChoiceMessage(thought, content, tuple(calls))}, {}, {0: [finish]}, counts, "", whole)


def _text(item: Json) -> str:
    return "".join(part["text"] for part in item["content"])


def _disorder(events: Sequence[Json]) -> Iterator[str]:
    """Yields what is wrong with the order of a stream's events, or with what they add up to."""
    if [event["sequence_number"] for event in events] != list(range(len(events))):
        yield "events are not numbered one by one"
    if [event["type"] for event in events[:2]] != OPENING:
        yield "the stream doesn't open as one does"
    items: list[Json] = []
    texts: list[str] = []
    is_open = is_said = False
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            if is_open or event["output_index"] != len(items):
                yield "an item begins before the one before it is done"
            items.append(event["item"])
            texts.append("")
            is_open, is_said = True, False
        elif not is_open or event["output_index"] != len(items) - 1:
            yield f"{kind} is told of no open item"
        elif kind in DELTAS:
            texts[-1] += event["delta"]
            if DELTAS[kind] != items[-1]["type"]:
                yield f"{kind} is told of a {items[-1]['type']}"
        elif kind.endswith(("_text.done", "arguments.done")):
            is_said = True
            if event.get("text", event.get("arguments")) != texts[-1]:
                yield f"{kind} says another text than its deltas"
        elif kind == "response.output_item.done":
            items[-1], is_open = event["item"], False
            if not is_said:
                yield "an item is done before its text is"
    if is_open or items != events[-1]["response"]["output"]:
        yield "the response's items are others than its events told"
