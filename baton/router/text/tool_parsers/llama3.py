"""Llama 3.1 and later: the whole answer is ``{"name": …, "parameters": {…}}``, several apart by ``;``, perhaps
after ``<|python_tag|>``. An answer that begins otherwise calls nothing.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/ (JSON based tool calling)
"""

from __future__ import annotations

from baton.router.text.call_json import CallParser
from baton.router.text.lazy_calls import CallSyntax
from baton.router.text.tool_events import Event, TextEvent
from baton.router.text.tool_parsers import ParserContext, ToolParser

TAG = "<|python_tag|>"
MARKS = (TAG, "<|eom_id|>", "Environment: ipython")
ARGUMENTS = "parameters"
_BETWEEN = " \t\r\n;,"


class Llama3:
    """Parses Llama 3 calls: an answer that begins with "{" or TAG is calls, any other one is text."""

    def __init__(self) -> None:
        self._start: list[str] = []
        self._blank = True  # nothing but white space so far
        self._says: bool | None = None
        self._calls = CallParser()
        self._before = -1
        self._raw: list[str] = []

    def push(self, text: str) -> list[Event]:
        """Returns the events of ``text``; none until the answer's beginning shows whether it is calls or text."""
        if self._says is None:
            text = self._judge(text)
        if self._says is None or not text:
            return []
        return [TextEvent(text)] if self._says else self._read(text)

    @property
    def closed(self) -> bool:
        """Returns whether the JSON of the last call is whole and no other one has begun."""
        return self._before >= 0 and not self._raw

    def flush(self) -> list[Event]:
        """Returns the text that was held back, or a JSON value that named no function."""
        held = "".join(self._start) if self._says is None else self._unread()
        return [TextEvent(held)] if held else []

    def _judge(self, text: str) -> str:
        """Returns what to read of the text so far; empty while it may still be either."""
        self._start.append(text)
        self._blank = self._blank and not text.strip()
        if self._blank:
            return ""
        whole = "".join(self._start)
        begin = whole.lstrip()
        if begin.startswith(("{", TAG)):
            self._says = False
            return begin.removeprefix(TAG)
        if TAG.startswith(begin):
            return ""
        self._says = True
        return whole

    def _read(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if not self._raw and self._before >= 0:  # behind a call
                text = text.lstrip(_BETWEEN)
            if not text:
                break
            found, rest = self._calls.push(text)
            self._raw.append(text[: len(text) - len(rest)])
            events += found
            text = rest
            if self._calls.broken or (self._calls.done and self._calls.index == self._before):  # a list of none
                self._says = True
                said = self._unread() + text
                return [*events, TextEvent(said)] if said else events
            if self._calls.done:
                self._before, self._raw = self._calls.index, []
                self._calls = CallParser(self._before + 1)
        return events

    def _unread(self) -> str:
        """The value at hand, unless its call has begun."""
        raw, self._raw = "".join(self._raw), []
        return raw if self._calls.index == self._before else ""


def lazy_rules(name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer that is calls if it begins as one, else text (``lazy_calls.LazyRules``)."""
    tag, says = TAG.replace("|", "\\|"), f"{name.upper()}_SAYS"
    return (
        f"{name}: {says} | SPACE? ({syntax.mark(TAG)} SPACE?)? call (/[ \\t\\r\\n;,]{{1,8}}/ call)*\n"
        f"{says}: {before} & ~/\\s*(\\{{|{tag})(.|\\n)*/\n"
    )


def make(context: ParserContext = ParserContext()) -> ToolParser:
    """Returns a parser for one answer."""
    return Llama3()
