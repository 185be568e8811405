"""Incremental parser of calls whose arguments stand one by one between tags, as bare text.

Knows nothing of any one format: ``Tags`` says how its tags read. Text arguments are emitted as they arrive, others
once they are whole, because only then they can be told from text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial

import msgspec

from baton.protos.json import Json
from baton.router.text.call_parts.argument_types import TEXT, allowed_types, json_text
from baton.router.text.call_parts.mark_walk import ParserPlace, walked
from baton.router.text.marks import Interlude, MarkSplitter
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, Event, TextEvent

_NAME = re.compile(r'"?([a-zA-Z0-9_.-]{1,64})"?')
_MOST_HEAD = 100  # characters of a name with its quotes and blanks


class Tags(msgspec.Struct, frozen=True):
    """Describes the tags of a format.

    A call is ``call NAME named``, then ``key KEY keyed value TEXT end`` per argument, then ``closed``. ``named`` is
    "" where the first ``key`` ends the name, ``value`` where nothing stands before the text. ``section`` and
    ``section_end`` may stand around calls. ``trims``: line breaks stand around the text, one on each side.
    """

    call: str
    named: str
    key: str
    keyed: str
    value: str
    end: str
    closed: str
    section: str = ""
    section_end: str = ""
    trims: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Returns the tags that are more than a bracket."""
        found = (self.section, self.call, self.key, self.keyed, self.value, self.end, self.closed, self.section_end)
        return tuple(tag for tag in found if len(tag) > 2)


class TaggedCalls:
    """Parses calls by ``tags``; ``schemas`` are those of the arguments by tool. Text that is no call is the
    answer's.
    """

    def __init__(self, tags: Tags, schemas: Mapping[str, Json]) -> None:
        self._tags, self._schemas = tags, schemas
        self._interlude = Interlude()
        self._index, self._closed = -1, False
        self._raw: list[str] = []  # tags and text of what may yet be no call
        self._called = False  # in a section, or behind a call that may stand in one
        self._name: list[str] = []
        self._key: list[str] = []
        self._value: _Value | None = None
        self._arguments = 0
        self._go("text")

    @property
    def closed(self) -> bool:
        """Returns whether the end of the last call has come."""
        return self._closed

    def push(self, text: str) -> list[Event]:
        """Returns the events of ``text``, which may enter and leave calls several times."""
        return walked(text, self._place)

    def _place(self) -> ParserPlace:
        return ParserPlace(self._splitter, partial(_READ[self._at], self))

    def flush(self) -> list[Event]:
        """Returns the text that was held back; a call without an end counts if its name was read."""
        events: list[Event] = []
        held = self._splitter.flush()
        if self._at in ("text", "section", "name"):
            self._say("".join([*self._raw, held]), events)
        elif self._at == "value" and self._value is not None:
            self._argue(self._value.push(held) + self._value.cut(), events)
        return events

    def _go(self, at: str) -> None:
        tags = self._tags
        marks = {
            "text": (tags.section, tags.call),
            "section": (tags.section, tags.call, tags.section_end),
            "name": (tags.named or tags.key, "" if tags.named else tags.closed),
            "arguments": (tags.key, tags.closed, tags.section_end, tags.call),
            "key": (tags.keyed,),
            "before": (tags.value, tags.closed),
            "value": (tags.end,),
        }
        self._at, self._splitter = at, MarkSplitter(*filter(None, dict.fromkeys(marks[at])))

    # ---- around calls --------------------------------------------------------------------------------

    def _in_text(self, said: str, mark: str, events: list[Event]) -> str:
        self._say(said, events)
        if mark:
            self._called, self._raw = False, [mark]
            self._go("name" if mark == self._tags.call else "section")
        return ""

    def _in_section(self, said: str, mark: str, events: list[Event]) -> str:
        """Only blanks may stand around calls in a section, or before the end of one that was not begun."""
        if said.strip():
            self._leave_section(events)
            return said + mark
        self._raw.append(said)
        if mark == self._tags.section_end:
            if not self._called:
                self._raw.append(mark)
                self._say("".join(self._raw), events)
            self._raw = []
            self._go("text")
        elif mark == self._tags.section:
            self._leave_section(events)
            self._raw, self._called = [mark], False
            self._go("section")
        elif mark:
            self._raw.append(mark)
            self._go("name")
        return ""

    def _leave_section(self, events: list[Event]) -> None:
        self._say("".join(self._raw), events)
        self._raw = []
        self._go("text")

    def _say(self, text: str, events: list[Event]) -> None:
        if said := self._interlude.push(text):
            events.append(TextEvent(said))

    # ---- calls ---------------------------------------------------------------------------------------

    def _in_name(self, said: str, mark: str, events: list[Event]) -> str:
        self._name.append(said)
        name = "".join(self._name)
        short = len(name) <= _MOST_HEAD
        fits = _NAME.fullmatch(name.strip()) if short else None
        if not mark and (fits or (short and _NAME.fullmatch(f"{name}a".lstrip()))):
            self._raw.append(said)
            return ""
        self._name = []
        if not mark or fits is None:
            self._leave_section(events)
            return said + mark
        self._index, self._closed, self._arguments = self._index + 1, False, 0
        self._schema = self._schemas.get(fits[1], {})
        self._raw, self._called = [], True
        self._interlude.call()
        events.append(CallEvent(self._index, fits[1]))
        if mark == self._tags.closed:
            self._close(events)
        else:
            self._go("arguments" if self._tags.named else "key")
        return ""

    def _in_arguments(self, said: str, mark: str, events: list[Event]) -> str:
        if mark == self._tags.key:
            self._key = []
            self._go("key")
        elif mark:
            self._close(events)
            return "" if mark == self._tags.closed else mark
        return ""

    def _in_key(self, said: str, mark: str, events: list[Event]) -> str:
        self._key.append(said)
        if mark:
            self._go("before" if self._tags.value else "value")
            self._begin_value(events)
        return ""

    def _before_value(self, said: str, mark: str, events: list[Event]) -> str:
        if mark == self._tags.value:
            self._go("value")
        elif mark:
            self._close(events)
        return ""

    def _begin_value(self, events: list[Event]) -> None:
        key, properties = "".join(self._key).strip().strip('"'), self._schema.get("properties")
        schema = properties.get(key, {}) if isinstance(properties, dict) else {}
        self._value = _Value(key, allowed_types(schema, self._schema), self._tags.trims)

    def _in_value(self, said: str, mark: str, events: list[Event]) -> str:
        assert self._value is not None
        self._argue(self._value.push(said), events)
        if mark:
            self._argue(self._value.end(), events)
            self._go("arguments")
        return ""

    def _argue(self, text: str, events: list[Event]) -> None:
        """Emits ``text`` of the arguments, behind the key that it begins with."""
        value = self._value
        assert value is not None
        if text and not value.told:
            value.told = True
            before = ", " if self._arguments else "{"
            self._arguments += 1
            text = f"{before}{json.dumps(value.key, ensure_ascii=False)}: {text}"
        if text:
            events.append(ArgumentsEvent(self._index, text))

    def _close(self, events: list[Event]) -> None:
        events.append(ArgumentsEvent(self._index, "}" if self._arguments else "{}"))
        self._closed = True
        self._go("section" if self._tags.section else "text")


_READ = {
    "text": TaggedCalls._in_text,
    "section": TaggedCalls._in_section,
    "name": TaggedCalls._in_name,
    "arguments": TaggedCalls._in_arguments,
    "key": TaggedCalls._in_key,
    "before": TaggedCalls._before_value,
    "value": TaggedCalls._in_value,
}


class _Value:
    """Turns one argument's text into JSON; ``told`` says whether any of it was emitted."""

    def __init__(self, key: str, types: frozenset[str], trims: bool) -> None:
        self.key, self.told = key, False
        self._types, self._streams = types, types == TEXT
        self._begins, self._trims = trims, trims
        self._break = ""  # a line break that may be the last
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Returns the JSON text that the next part of the argument makes certain."""
        text = self._trimmed(text)
        if not self._streams:
            self._held.append(text)
            return ""
        return self._quote(text) if text else ""

    def end(self) -> str:
        """Returns the rest of the JSON text."""
        if self._streams:
            return '"' if self.told else '""'
        return json_text("".join(self._held), self._types)

    def cut(self) -> str:
        """Returns what was held back of an argument that doesn't end."""
        return "" if self._streams else "".join(self._held)

    def _quote(self, text: str) -> str:
        return ("" if self.told else '"') + json.dumps(text, ensure_ascii=False)[1:-1]

    def _trimmed(self, text: str) -> str:
        if not self._trims or not text:
            return text
        if self._begins:
            self._begins = False
            text = text.removeprefix("\n")
        text = self._break + text
        self._break = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")
