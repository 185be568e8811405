"""Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": …, "arguments": …}</tool_call>``, each call in marks of its own.

Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from baton.router.text.call_json import CallParser
from baton.router.text.lazy_calls import CallSyntax
from baton.router.text.marks import Interlude, MarkSplitter
from baton.router.text.tool_events import Event, TextEvent
from baton.router.text.tool_parsers import ParserContext, ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = (BEGIN,)
ARGUMENTS = "arguments"


class Hermes:
    """Parses Hermes calls; text outside of the marks is the answer's text, and so is a call that is no JSON."""

    def __init__(self) -> None:
        self._outside, self._interlude = MarkSplitter(BEGIN), Interlude()
        self._inside: MarkSplitter | None = None
        self._calls = CallParser()
        self._raw: list[str] = []
        self._before = -1

    def push(self, text: str) -> list[Event]:
        """Returns the events of ``text``, which may enter and leave calls several times."""
        events: list[Event] = []
        rest: str | None = text
        while rest is not None:
            rest = self._within(rest, events) if self._inside else self._without(rest, events)
        return events

    @property
    def closed(self) -> bool:
        """Returns whether the JSON of the last call is whole."""
        return self._calls.done

    def flush(self) -> list[Event]:
        """Returns the last events; a call whose end mark is missing counts if its name was read."""
        events: list[Event] = []
        if self._inside is None:
            self._say(self._outside.flush(), events)
        else:
            self._read(self._inside.flush(), events)
            self._leave(events, "")
        return events

    def _without(self, text: str, events: list[Event]) -> str | None:
        said, behind = self._outside.push(text)
        self._say(said, events)
        if behind is not None:
            self._before = self._calls.index
            self._inside, self._raw, self._calls = MarkSplitter(END), [], CallParser(self._before + 1)
        return behind

    def _within(self, text: str, events: list[Event]) -> str | None:
        assert self._inside is not None
        body, behind = self._inside.push(text)
        self._read(body, events)
        if behind is None:
            return None
        if self._calls.in_string and not self._calls.broken:  # an argument that holds the mark
            self._read(END, events)
            self._inside = MarkSplitter(END)
        else:
            self._leave(events, END)
        return behind

    def _read(self, body: str, events: list[Event]) -> None:
        self._raw.append(body)
        if not self._calls.done:
            events += self._calls.push(body)[0]

    def _leave(self, events: list[Event], end: str) -> None:
        if self._calls.index == self._before:
            self._say(BEGIN + "".join(self._raw) + end, events)
        else:
            self._interlude.call()
        self._inside, self._outside = None, MarkSplitter(BEGIN)

    def _say(self, text: str, events: list[Event]) -> None:
        if said := self._interlude.push(text):
            events.append(TextEvent(said))


def lazy_rules(name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer in which what follows each BEGIN is a call (``lazy_calls.LazyRules``)."""
    return (
        f"{name}: {name}_call* {name}_free\n"
        f"{name}_call: {name}_open SPACE? call SPACE? {syntax.mark(END)}\n{syntax.free(name, before, BEGIN)}"
    )


def make(context: ParserContext = ParserContext()) -> ToolParser:
    """Returns a parser for one answer."""
    return Hermes()
