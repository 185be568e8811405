"""DeepSeek-V3, R1 and V3.1: within ``<｜tool▁calls▁begin｜>`` each call between ``<｜tool▁call▁begin｜>`` and
``<｜tool▁call▁end｜>``. V3.1 writes ``NAME<｜tool▁sep｜>{…}`` there. The others write ``function``, the separator,
``NAME`` and the arguments in a block of Markdown.

Source: https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1 (tokenizer_config.json)
"""

from __future__ import annotations

import json
import re
from functools import partial

from baton.router.text.call_parts.json_value import JsonValue
from baton.router.text.call_parts.mark_walk import ParserPlace, walked
from baton.router.text.lazy_calls import CallSyntax, json_of
from baton.router.text.marks import Interlude, MarkSplitter
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, Event, TextEvent
from baton.router.text.tool_parsers import ParserContext, ToolParser

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (SECTION, BEGIN, SEPARATOR, END, SECTION_END)
ARGUMENTS = "arguments"
_FENCE = "```"
_OPEN, _SHUT = f"\n{_FENCE}json\n", f"\n{_FENCE}"  # around arguments in a block of Markdown
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_AT = {
    "text": (SECTION, BEGIN),
    "section": (SECTION, BEGIN, SECTION_END),
    "head": (SEPARATOR, END, SECTION_END),
    "name": ("{", END, SECTION_END),
    "arguments": (END, SECTION_END, BEGIN),
}


class DeepSeekV3:
    """Parses DeepSeek's calls; text outside of the marks is the answer's text, and so is a call without a name."""

    def __init__(self) -> None:
        self._interlude = Interlude()
        self._index, self._closed = -1, False
        self._raw: list[str] = []  # marks and text of what may yet be no call
        self._called = False  # behind a call that may stand in a section
        self._parts: list[str] = []  # of a call's head, or of its name
        self._head = ""
        self._value = JsonValue()
        self._go("text")

    @property
    def closed(self) -> bool:
        """Returns whether the end of the last call has come, or its JSON is whole."""
        return self._closed or (self._at == "arguments" and self._value.done)

    def push(self, text: str) -> list[Event]:
        """Returns the events of ``text``, which may enter and leave calls several times."""
        return walked(text, self._place)

    def _place(self) -> ParserPlace:
        return ParserPlace(self._splitter, partial(_READ[self._at], self))

    def flush(self) -> list[Event]:
        """Returns the text that was held back; a call without an end counts if its name was read."""
        events: list[Event] = []
        held = self._splitter.flush()
        if self._at == "arguments":
            self._argue(held, events)
        else:
            self._say("".join([*self._raw, held]), events)
        return events

    def _go(self, at: str) -> None:
        self._at, self._splitter = at, MarkSplitter(*_AT[at])

    def _say(self, text: str, events: list[Event]) -> None:
        if said := self._interlude.push(text):
            events.append(TextEvent(said))

    def _give_up(self, events: list[Event]) -> None:
        """Says what was read of no call, or of the blanks behind one."""
        self._say("".join(self._raw), events)
        self._raw = []
        self._go("text")

    def _in_text(self, said: str, mark: str, events: list[Event]) -> str:
        self._say(said, events)
        if mark:
            self._raw, self._called = [], False
            self._enter(mark)
        return ""

    def _enter(self, mark: str) -> None:
        self._raw.append(mark)
        self._parts = []
        self._go("head" if mark == BEGIN else "section")

    def _in_section(self, said: str, mark: str, events: list[Event]) -> str:
        if said.strip() or mark == SECTION:
            self._give_up(events)
            return said + mark
        self._raw.append(said)
        if mark == SECTION_END:
            if not self._called:
                self._raw.append(mark)
                self._say("".join(self._raw), events)
            self._raw = []
            self._go("text")
        elif mark:
            self._enter(mark)
        return ""

    def _in_head(self, said: str, mark: str, events: list[Event]) -> str:
        self._raw.append(said)
        self._parts.append(said)
        if mark == SEPARATOR:
            self._raw.append(mark)
            self._head, self._parts = "".join(self._parts).strip(), []
            self._go("name")
        elif mark:
            self._raw.append(mark)
            self._give_up(events)
        return ""

    def _in_name(self, said: str, mark: str, events: list[Event]) -> str:
        self._raw.append(said)
        self._parts.append(said)
        if not mark:
            return ""
        name = "".join(self._parts).partition(_FENCE)[0].strip() or self._head
        if not _NAME.fullmatch(name):
            self._give_up(events)
            return mark
        self._index, self._closed, self._called = self._index + 1, False, True
        self._raw, self._value = [], JsonValue()
        self._interlude.call()
        events.append(CallEvent(self._index, name))
        if mark != "{":
            events.append(ArgumentsEvent(self._index, "{}"))
            return self._close(mark)
        self._go("arguments")
        return mark

    def _in_arguments(self, said: str, mark: str, events: list[Event]) -> str:
        self._argue(said, events)
        if mark and self._value.in_string:
            self._argue(mark, events)
            self._go("arguments")
        elif mark:
            return self._close(mark)
        return ""

    def _argue(self, text: str, events: list[Event]) -> None:
        if text := text[: self._value.push(text)]:
            events.append(ArgumentsEvent(self._index, text))

    def _close(self, mark: str) -> str:
        self._closed = True
        self._go("section")
        return "" if mark == END else mark


_READ = {
    "text": DeepSeekV3._in_text,
    "section": DeepSeekV3._in_section,
    "head": DeepSeekV3._in_head,
    "name": DeepSeekV3._in_name,
    "arguments": DeepSeekV3._in_arguments,
}


def lazy_rules(name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer in which what follows each BEGIN is a call in one of the two forms
    (``lazy_calls.LazyRules``).
    """
    separator, end = syntax.mark(SEPARATOR), syntax.mark(END)
    tools = "".join(
        f"{name}_tool_{at}: ({json.dumps(tool)} {separator} {name}_of_{at}"
        f' | "function" {separator} {json.dumps(tool + _OPEN)} {name}_of_{at} {json.dumps(_SHUT)}) {end}\n'
        f"{name}_of_{at}: {json_of(arguments)}\n"
        for at, (tool, arguments) in enumerate(syntax.tools)
    )
    any_tool = "(" + " | ".join(f"{name}_tool_{at}" for at in range(len(syntax.tools))) + ")"
    free = syntax.free(name, before, BEGIN)
    if syntax.special(SECTION) is None:
        return f"{name}: {name}_call* {name}_free\n{name}_call: {name}_open {any_tool}\n{tools}{free}"
    calls = f"{syntax.mark(SECTION)} (SPACE? {syntax.mark(BEGIN)} {any_tool})+ SPACE? {syntax.mark(SECTION_END)}"
    return f"{name}: ({name}_free {name}_calls)* {name}_free\n{name}_calls: {calls}\n{tools}{free}"


def make(context: ParserContext = ParserContext()) -> ToolParser:
    """Returns a parser for one answer."""
    return DeepSeekV3()
