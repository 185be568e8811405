"""Parsing of a chat answer's text into reasoning, content and tool calls, as OpenAI's deltas.

Knows nothing of ids, streams or which model wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from baton.protos.json import Json
from baton.router.text.reasoning_parsers import ReasoningParser
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, Event, TextEvent, ThoughtEvent
from baton.router.text.tool_parsers import ToolParser

MessageDelta = Json


class AnswerFormat(msgspec.Struct, frozen=True):
    """Says how a call's answers are parsed; each choice gets parsers of its own.

    ``marks``: markup between reasoning, content and calls that belongs to none of them. ``parallel`` False keeps
    only the first call. ``binds_calls`` says that a grammar holds the calls of strict tools to their schemas.
    """

    tools: Callable[[], ToolParser] | None = None
    reasoning: Callable[[], ReasoningParser] | None = None
    call_id: Callable[[], str] = lambda: "call"
    parallel: bool = True
    shows_reasoning: bool = True
    marks: tuple[str, ...] = ()
    binds_calls: bool = False

    def reader(self) -> ChatReader:
        """Returns a new reader, for one choice."""
        return ChatReader(self)


class ChatReader:
    """Parses the text of one choice; ``calls`` counts the tool calls that have begun."""

    def __init__(self, reading: AnswerFormat) -> None:
        self._reading = reading
        self._tools = reading.tools() if reading.tools else None
        self._reasoning = reading.reasoning() if reading.reasoning else None
        self.calls = 0
        self._arguments: list[str] = []  # parts of those of the last call that is shown

    def push(self, text: str) -> list[MessageDelta]:
        """Returns the deltas that ``text``, the next part of the answer, makes certain."""
        if self._reasoning is None:
            return self._answer(text)
        thought, answer = self._reasoning.push(text)
        return self._thought(thought) + self._answer(answer)

    def flush(self) -> list[MessageDelta]:
        """Returns the deltas that were held back; call it at the answer's end."""
        deltas: list[MessageDelta] = []
        if self._reasoning is not None:
            thought, answer = self._reasoning.flush()
            deltas = self._thought(thought) + self._answer(answer)
        return deltas + self._deltas(self._tools.flush()) if self._tools else deltas

    def finish_reason(self, reason: str, stop_string: str = "") -> str:
        """Returns "tool_calls" for a choice that stopped after calls, else ``reason``.

        ``stop_string`` is the one that ended the choice, "" if none did: a call within which it came is not to be
        made, because its arguments are cut.
        """
        if reason != "stop" or not self.calls:
            return reason
        return reason if stop_string and self._is_cut() else "tool_calls"

    def message(self, text: str) -> MessageDelta:
        """Returns the whole answer ``text`` as OpenAI's message object."""
        message: MessageDelta = {"role": "assistant", "content": None, "refusal": None}
        for delta in self.push(text) + self.flush():
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                _add(message.setdefault("tool_calls", []), call)
        if message["content"] is None and not self.calls:
            message["content"] = ""
        return message

    def _is_cut(self) -> bool:
        """Returns whether the answer ends within its last call."""
        assert self._tools is not None
        return not self._tools.closed and not _is_whole("".join(self._arguments))

    def _thought(self, text: str) -> list[MessageDelta]:
        return [{"reasoning_content": text}] if text and self._reading.shows_reasoning else []

    def _answer(self, text: str) -> list[MessageDelta]:
        if self._tools is not None:
            return self._deltas(self._tools.push(text))
        return [{"content": text}] if text else []

    def _deltas(self, events: list[Event]) -> list[MessageDelta]:
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> MessageDelta | None:
        if isinstance(event, TextEvent):
            return {"content": event.text}
        if isinstance(event, ThoughtEvent):
            return {"reasoning_content": event.text} if self._reading.shows_reasoning else None
        if event.index and not self._reading.parallel:
            return None
        if isinstance(event, CallEvent):
            self.calls += 1
            self._arguments.clear()
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": self._reading.call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        assert isinstance(event, ArgumentsEvent)
        self._arguments.append(event.text)
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _is_whole(arguments: str) -> bool:
    """Returns whether a call's arguments are whole JSON."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):  # the latter where they nest too deep
        return False
    return True


def _add(calls: list[MessageDelta], part: MessageDelta) -> None:
    """Put a delta's part of a call where it belongs."""
    if "id" in part:
        calls.append({key: part[key] for key in ("id", "type", "function")})
    else:
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
