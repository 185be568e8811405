"""Incremental parser of calls whose JSON stands between marks: a section of calls, each with a name, a separator
and its arguments.

Knows nothing of any one format: ``CallMarks`` says how the marks read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import msgspec

from baton.router.text.call_parts.json_value import JsonValue
from baton.router.text.call_parts.mark_walk import ParserPlace, walked
from baton.router.text.marks import Interlude, MarkSplitter
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, Event, TextEvent

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class CallMarks(msgspec.Struct, frozen=True):
    """Describes the marks of a format: a call is ``begin HEAD separator {...} end``; ``section`` and
    ``section_end`` may stand around calls.
    """

    section: str
    begin: str
    separator: str
    end: str
    section_end: str

    @property
    def all(self) -> tuple[str, ...]:
        """Returns the marks in the order in which an answer has them."""
        return self.section, self.begin, self.separator, self.end, self.section_end

    def places(self) -> dict[str, tuple[str, ...]]:
        """Returns the marks that matter at each place of a parser."""
        return {
            "text": (self.section, self.begin),
            "section": (self.section, self.begin, self.section_end),
            "head": (self.separator, self.end, self.section_end),
            "name": ("{", self.end, self.section_end),
            "arguments": (self.end, self.section_end, self.begin),
        }


class SectionedCalls:
    """Parses calls between ``marks``; text outside of them is the answer's text, and so is a call without a name.

    ``name_of`` returns the tool's name from the text before and behind the separator.
    """

    def __init__(self, marks: CallMarks, name_of: Callable[[str, str], str]) -> None:
        self._marks, self._name_of, self._places = marks, name_of, marks.places()
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
        self._at, self._splitter = at, MarkSplitter(*self._places[at])

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
        self._go("head" if mark == self._marks.begin else "section")

    def _in_section(self, said: str, mark: str, events: list[Event]) -> str:
        if said.strip() or mark == self._marks.section:
            self._give_up(events)
            return said + mark
        self._raw.append(said)
        if mark == self._marks.section_end:
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
        if mark == self._marks.separator:
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
        name = self._name_of(self._head, "".join(self._parts))
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
        return "" if mark == self._marks.end else mark


_READ = {
    "text": SectionedCalls._in_text,
    "section": SectionedCalls._in_section,
    "head": SectionedCalls._in_head,
    "name": SectionedCalls._in_name,
    "arguments": SectionedCalls._in_arguments,
}
