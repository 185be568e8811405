"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or since v11 ``[TOOL_CALLS]name[ARGS]{…}`` per call.

Source: https://github.com/mistralai/mistral-common (instruct tokenizers v3 to v13)
"""

from __future__ import annotations

import json

from baton.router.text.call_json import CallParser
from baton.router.text.lazy_calls import CallSyntax, json_of
from baton.router.text.marks import Interlude, MarkSplitter
from baton.router.text.tool_events import Event, TextEvent
from baton.router.text.tool_parsers import ParserContext, ToolParser

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKS = (MARK,)
ARGUMENTS = "arguments"


class Mistral:
    """Parses Mistral's calls: text before the first mark is the answer's text; after it there are only calls."""

    def __init__(self) -> None:
        self._outside: MarkSplitter | None = MarkSplitter(MARK)
        self._interlude = Interlude()
        self._calls = CallParser()
        self._before = -1
        self._head: list[str] | None = None  # after a mark: what stands before the arguments
        self._blank = True  # nothing but white space stands there so far
        self._raw: list[str] = []

    def push(self, text: str) -> list[Event]:
        """Returns the events that ``text``, the next part of the answer, makes certain."""
        events: list[Event] = []
        rest = text
        while rest:
            rest = self._say_until_mark(rest, events) if self._outside else self._call(rest, events)
        return events

    @property
    def closed(self) -> bool:
        """Returns whether the JSON of the last call, or of the list of calls, is whole."""
        return self._calls.done

    def flush(self) -> list[Event]:
        """Returns the text that was held back; a call without a name is returned as text."""
        if self._outside:
            held = self._outside.flush()
        else:
            unread = self._calls.index == self._before
            held = "".join([MARK, *(self._head or ()), *self._raw]) if unread else ""
        said = self._interlude.push(held)
        return [TextEvent(said)] if said else []

    def _say_until_mark(self, text: str, events: list[Event]) -> str:
        assert self._outside is not None
        said, behind = self._outside.push(text)
        if said := self._interlude.push(said):
            events.append(TextEvent(said))
        if behind is None:
            return ""
        self._outside, self._head, self._raw, self._blank = None, [], [], True
        self._before = self._calls.index
        self._calls = CallParser(self._before + 1)
        return behind

    def _call(self, text: str, events: list[Event]) -> str:
        if self._head is not None:
            text = self._read_head(text, events)
        for at, char in enumerate(text):
            self._raw.append(char)
            events += self._calls.push(char)[0]
            if self._named and self._calls.passed:
                events += self._calls.push("}")[0]
            if self._calls.done or self._calls.broken:
                if self._calls.index == self._before:
                    events.append(TextEvent(self._interlude.push(MARK + "".join(self._raw))))
                else:
                    self._interlude.call()
                self._outside = MarkSplitter(MARK)
                return text[at + 1 :]
        return ""

    def _read_head(self, text: str, events: list[Event]) -> str:
        """Returns what to read as JSON: all of it in the older form, the arguments in the newer one."""
        assert self._head is not None
        self._head.append(text)
        if self._blank:
            begin = text.lstrip()
            self._blank, self._named = not begin, not begin.startswith("[")
            if begin and not self._named:
                self._head = None
                return begin
        if "{" not in text:
            return ""
        begin = "".join(self._head).lstrip()
        at = begin.find("{")
        name = begin[:at].split(CALL_ID)[0].removesuffix(ARGS).strip()
        self._head, self._raw = None, [begin[:at]]
        events += self._calls.push('{"name":' + json.dumps(name) + ',"arguments":')[0]
        return begin[at:]

    _named = False


def lazy_rules(name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer that is text, or text and calls in one of the two forms
    (``lazy_calls.LazyRules``).
    """
    named = [
        f"{json.dumps(tool)} {name}_id? {syntax.mark(ARGS)}? {json_of(arguments)}"
        for tool, arguments in syntax.tools
    ]
    tools = "".join(f"{name}_tool_{at}: {rule}\n" for at, rule in enumerate(named))
    return (
        f"{name}: {name}_free | {name}_open SPACE? {name}_list SPACE? | {name}_open {name}_calls\n"
        f'{name}_list: "[" SPACE? call (SPACE? "," SPACE? call)* SPACE? "]"\n'
        f"{name}_calls: {name}_tool ({syntax.mark(MARK)} {name}_tool)*\n"
        f"{name}_tool: {' | '.join(f'{name}_tool_{at}' for at in range(len(named)))}\n{tools}"
        f"{name}_id: {syntax.mark(CALL_ID)} /[a-zA-Z0-9]{{1,64}}/\n{syntax.free(name, before, MARK)}"
    )


def make(context: ParserContext = ParserContext()) -> ToolParser:
    """Returns a parser for one answer."""
    return Mistral()
