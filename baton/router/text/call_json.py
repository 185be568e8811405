"""Incremental parser of one JSON value that holds tool calls: ``{"name": …, "arguments": {…}}`` or an array of
them.

Knows nothing of what stands around the value. Of several names or arguments of one call the first counts, because
it has been emitted when another one comes. Arguments are emitted as they arrive; a call's name is always emitted
before its arguments, which are held back if the model writes them first.
"""

from __future__ import annotations

import json

from baton.router.text.surrogates import whole_pairs
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, Event

ARGUMENTS = frozenset({"arguments", "parameters"})
NONE = "{}"  # the text of no arguments
_SPACE = " \t\r\n"
_CLOSES = {"}": "{", "]": "["}


class CallParser:
    """Parses one JSON value of tool calls incrementally; ``first_index`` is the first call's index.

    ``done`` is set after its last character, ``broken`` where it can't be the JSON of a call, ``in_string`` within
    a string.
    """

    def __init__(self, first_index: int = 0) -> None:
        self.done = self.broken = False
        self.index = first_index - 1
        self._stack: list[str] = []
        self._level = 0  # how deep a call's own keys are: 1 in an object, 2 in an array of objects
        self.in_string = self._escaped = False
        self._begin_call()

    def push(self, text: str) -> tuple[list[Event], str]:
        """Returns the events of ``text``, and the part of ``text`` after the value (or from where it broke on)."""
        events: list[Event] = []
        for at, char in enumerate(text):
            if self.done or self.broken:
                self._release(events)
                return events, text[at:]
            self._take(char, events)
        self._release(events)
        return events, ""

    def _begin_call(self) -> None:
        self._text: list[str] = []  # its characters: a string that grows is copied for each
        self._key: str | None = None
        self._value_at: int | None = None
        self._value_end: int | None = None
        self._string_at = self._sent = 0
        self._name: str | None = None
        self._waiting = ""
        self._argued = False  # whether its arguments are read

    @property
    def passed(self) -> bool:
        """Returns whether the last character completed an object or array that is the value of a call's own key."""
        return self._value_end is not None

    @property
    def _argues(self) -> bool:
        """Returns whether the value at hand is the call's arguments: the first that it has."""
        return self._key in ARGUMENTS and not self._argued

    @property
    def _own(self) -> bool:
        """Returns whether the position is among a call's own keys."""
        return len(self._stack) == self._level > 0

    def _take(self, char: str, events: list[Event]) -> None:
        at = len(self._text)
        self._text.append(char)
        if self.in_string:
            self._take_in_string(char, at)
        elif char in _CLOSES:
            self._close(char, at, events)
        elif char == ":" and self._own:
            if self._key is not None:  # behind a value
                self.broken = True
                return
            self._value_at = None
            self._key = "".join(self._text[self._string_at : at]).rstrip(_SPACE)[:-1]
        elif char == "," and self._own:
            self._end_value(at, events)
        elif char not in _SPACE:
            self._begin_value(char, at)

    def _take_in_string(self, char: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False

    def _begin_value(self, char: str, at: int) -> None:
        if self._own and self._key is not None and self._value_at is None:
            self._value_at = at
        if char == '"':
            self.in_string = True
            if self._own and self._key is None:
                self._string_at = at + 1
        elif char in "{[":
            self._open(char)
        self.broken = self.broken or not self._stack

    def _open(self, char: str) -> None:
        if not self._stack:
            self._level = 1 if char == "{" else 2
        self._stack.append(char)
        if self._own:
            self.broken = char != "{"
            self._begin_call()

    def _close(self, char: str, at: int, events: list[Event]) -> None:
        if not self._stack or self._stack[-1] != _CLOSES[char]:
            self.broken = True
            return
        if self._own:
            self._end_value(at, events)
            self.broken = self._name is None
            if not self._argued:  # a call without any: clients parse what they get
                self._argued, self._waiting = True, NONE
                self._release(events)
        self._stack.pop()
        self.done = not self._stack
        if self._own and self._value_at is not None:
            self._value_end = at + 1

    def _end_value(self, at: int, events: list[Event]) -> None:
        if self._key is None or self._value_at is None:
            return
        value = "".join(self._text[self._value_at : at]).rstrip(_SPACE)
        if self._key == "name":
            self._call(value, events)
        elif self._argues:
            self._argued = True
            self._waiting += value[self._sent :] if value[:1] == "{" else _unquoted(value) or NONE
        self._key = self._value_at = self._value_end = None
        self._sent = 0
        self._release(events)

    def _call(self, value: str, events: list[Event]) -> None:
        if self._name is not None:
            return
        name = _unquoted(value)
        if not name or value[:1] != '"':
            self.broken = True
            return
        self._name = name
        self.index += 1
        events.append(CallEvent(self.index, name))

    def _release(self, events: list[Event]) -> None:
        """Give out what is certain: an object's text as it comes, anything else once it is whole."""
        if self._name is None:
            return
        at, found = self._value_at, self._waiting
        if self._argues and at is not None and self._text[at] == "{":
            found += "".join(self._text[at + self._sent : self._value_end])
            self._sent += len(found) - len(self._waiting)
        self._waiting = ""
        if found:
            events.append(ArgumentsEvent(self.index, found))


def _unquoted(value: str) -> str:
    """Returns a JSON string's text, "" for null, any other value as it stands."""
    if value == "null":
        return ""
    try:
        return str(json.loads(whole_pairs(value))) if value[:1] == '"' else value
    except ValueError:
        return value
