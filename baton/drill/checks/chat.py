"""Reads chats' replies over HTTP and holds them against the oracle. Shares no code with the router's.

Knows nothing of engines. A call that a grammar demands is JSON, which may end anywhere if its tokens run out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import orjson

from baton.drill.checks.text import DONE, AnswerText, finishes
from baton.drill.language.vocabulary import TOOLS
from baton.drill.scenario import Request
from baton.protos.json import Json

THOUGHT = re.compile(r"(?P<thought>.*?)(?:</think>\n*(?P<rest>.*)|\Z)", re.DOTALL)
# A stop string may begin with the last character of a call's end; the call is one all the same.
CALL = re.compile(r"<tool_call>(.*?)</tool_call(?:>|\Z)", re.DOTALL)
LISTED = re.compile(r'{"name": "(\w+)",(?: "parameters": ({[^}]*}?))?')


class ChoiceMessage(NamedTuple):
    """Holds the message of one choice: thought, content, and calls as (name, JSON text of the arguments)."""

    thought: str
    content: str
    calls: tuple[tuple[str, str], ...]


class ChatReply(NamedTuple):
    """Holds what came of a reply: messages, scored tokens and finish reasons by choice.

    ``whole`` says whether the reply ended as one does.
    """

    said: Mapping[int, ChoiceMessage]
    scored: Mapping[int, int]
    finishes: Mapping[int, list[str]]
    usage: Json | None
    error: str
    whole: bool


def said_of(request: Request, text: str) -> ChoiceMessage:
    """Returns what ``text``, an answer's up to its stop string, says."""
    if request.tools == "named":
        return ChoiceMessage("", "", ((TOOLS[0], text),) if text else ())
    if request.tools == "required":
        return ChoiceMessage("", "", tuple((name, arguments or "") for name, arguments in LISTED.findall(text)))
    thought, text = ("", text) if request.sampling.grammar else _thought(text, request.thinks)
    return ChoiceMessage(thought, text, ()) if request.tools != "auto" else _called(thought, text)


def _thought(text: str, opened: bool) -> tuple[str, str]:
    """Returns the thought at the beginning of ``text`` and what follows it; ``opened``: the prompt ends in it."""
    begun = text if opened else text.lstrip().removeprefix("<think>")
    if not opened and begun == text.lstrip():
        return "", text
    found = THOUGHT.match(begun.lstrip("\n"))
    assert found is not None
    return found["thought"], found["rest"] or ""


def _called(thought: str, text: str) -> ChoiceMessage:
    """Returns the calls in ``text``; white space behind a call belongs to nobody where nothing follows it."""
    parts = CALL.split(text)
    calls = [json.loads(body) for body in parts[1::2]]
    said = [part for at, part in enumerate(parts[::2]) if not at or part.strip()]
    return ChoiceMessage(thought, "".join(said), tuple((c["name"], json.dumps(c["arguments"])) for c in calls))


def read_chat(request: Request, body: bytes) -> ChatReply:
    """Returns what a reply with status 200 held, streamed or not."""
    if request.over_http == "whole":
        whole = orjson.loads(body)
        return _read([whole], "message", whole.get("usage"), True)
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    events = [orjson.loads(line) for line in lines if line != DONE]
    usage = next((event["usage"] for event in events if event.get("usage")), None)
    return _read(events, "delta", usage, lines[-1:] == [DONE] and lines.count(DONE) == 1)


def _read(events: Sequence[Json], field: str, usage: Json | None, whole: bool) -> ChatReply:
    said: dict[int, ChoiceMessage] = {}
    scored: dict[int, int] = {}
    ends: dict[int, list[str]] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        index, scores = choice["index"], choice["logprobs"]
        said[index] = _added(said.get(index, ChoiceMessage("", "", ())), choice[field])
        scored[index] = scored.get(index, 0) + (len(scores["content"]) if scores else 0)
        ends.setdefault(index, []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
    error = next((event["error"]["code"] for event in events if "error" in event), "")
    return ChatReply(said, scored, ends, usage, error, whole)


def _added(before: ChoiceMessage, part: Json) -> ChoiceMessage:
    """Returns a message with the next part of a stream, or with a whole message, added to it."""
    calls = list(before.calls)
    for at, call in enumerate(part.get("tool_calls") or ()):
        function, index = call["function"], call.get("index", at)
        if "name" in function:
            calls.append((function["name"], ""))
        name, arguments = calls[index]
        calls[index] = name, arguments + function["arguments"]
    thought = before.thought + (part.get("reasoning_content") or "")
    return ChoiceMessage(thought, before.content + (part.get("content") or ""), tuple(calls))


def wrong_chat(request: Request, reply: ChatReply, want: Sequence[AnswerText]) -> Iterator[str]:
    """Yields what is wrong with a reply that came to its end without an error."""
    for index, text in enumerate(want):
        said, found = said_of(request, text.text), reply.said.get(index)
        if found != said and not _alike(found, said, request.anthropic):
            yield f"choice {index}: the message is not the oracle's: {found}, not {said}"
        ends = finishes(request, text)
        allowed = [["tool_calls"] if said.calls and end == ["stop"] else end for end in ends]
        if reply.finishes.get(index) not in allowed:
            yield f"choice {index}: finish reasons {reply.finishes.get(index)}, the oracle's is {text.finish}"
        if request.sampling.logprobs is not None and reply.scored.get(index) != text.tokens:
            yield f"choice {index}: {reply.scored.get(index)} log-probabilities of {text.tokens} tokens"
    if not reply.whole or len(reply.said) != len(want):
        yield f"{len(reply.said)} choices of {len(want)}, ended as a reply does: {reply.whole}"
    usage, written = reply.usage or {}, sum(text.tokens for text in want)
    if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != (len(request.prompt), written):
        yield f"usage {usage}, and there are {len(request.prompt)} + {written} tokens"


def _alike(found: ChoiceMessage | None, want: ChoiceMessage, parsed: bool) -> bool:
    """Returns whether two messages differ at most in the white space of calls' arguments, which a model chooses.

    ``parsed``: arguments are told as objects, so that of those that were cut off anything may be told.
    """
    if found is None or found[:2] != want[:2] or len(found.calls) != len(want.calls):
        return False
    return all(
        a[0] == b[0] and (a[1].replace(" ", "") == b[1].replace(" ", "") or (parsed and not _is_whole(b[1])))
        for a, b in zip(found.calls, want.calls, strict=True)
    )


def _is_whole(arguments: str) -> bool:
    """Returns whether the JSON text isn't cut off."""
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True
