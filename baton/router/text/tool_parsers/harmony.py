"""OpenAI's Harmony (gpt-oss): messages ``<|channel|>NAME<|message|>…<|end|>``, apart by ``<|start|>assistant``.

Channel ``analysis`` is reasoning, ``final`` the answer, and so is ``commentary`` unless its header names a
recipient ``to=functions.NAME``: then the message is that call's arguments. One parser reads all three, because they
take turns.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

from baton.router.text.call_parts.mark_walk import ParserPlace, walked
from baton.router.text.lazy_calls import CallSyntax, UnboundSchema, json_of
from baton.router.text.marks import MarkSplitter
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, Event, TextEvent, ThoughtEvent
from baton.router.text.tool_parsers import ParserContext, ToolParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
SIGNS = (CHANNEL,)
MARKS = (
    *(f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final")),
    *(f"{START}assistant", START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
)
ARGUMENTS = "arguments"
READS_THOUGHTS = True
_ENDS = (END, CALL, RETURN)
_NAMESPACE = "functions."
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_MOST_HEADER = 256  # characters of a message's header before its channel


class Harmony:
    """Parses messages of Harmony; text outside of any message is the answer's text.

    The prompt of ``context`` says in what message the answer begins.
    """

    def __init__(self, context: ParserContext = ParserContext()) -> None:
        self._context = context
        self._index, self._closed = -1, False
        self._tell: Callable[[str], Event] = TextEvent
        self._calls = self._has_begun = False  # in a call's message; behind any mark
        self._begin_header(False)
        _, started, head = context.prompt.rpartition(START)
        if started:
            self.push(head)
            self._raw.clear()  # the prompt's, not the answer's
            self._index, self._has_begun, self._in_prompt = -1, False, True

    @property
    def closed(self) -> bool:
        """Returns whether the mark behind the last call has come."""
        return self._closed

    def push(self, text: str) -> list[Event]:
        """Returns the events of ``text``, which may enter and leave messages several times."""
        return walked(text, self._place)

    def _place(self) -> ParserPlace:
        return ParserPlace(self._splitter, self._head if self._is_header else self._body)

    def flush(self) -> list[Event]:
        """Returns the text that was held back; a header that is cut before its message is dropped."""
        events: list[Event] = []
        held = self._splitter.flush()
        if not self._is_header:
            return [self._tell(held)] if held else []
        if not (self._is_cut or (self._in_prompt and self._has_channel)):
            self._say("".join([*self._raw, held]), events)
        return events

    # ---- headers -------------------------------------------------------------------------------------

    _in_prompt = False  # whether the header begins in the prompt

    def _begin_header(self, started: bool) -> None:
        self._is_header, self._is_cut, self._has_channel, self._in_prompt = True, started, False, False
        self._header: list[str] = []
        self._raw: list[str] = []
        self._splitter = MarkSplitter(START, CHANNEL, MESSAGE, *_ENDS)

    def _head(self, said: str, mark: str, events: list[Event]) -> str:
        """Reads a part of a header, and the mark behind it; returns what is to be read again as the answer's
        text.
        """
        if said:
            self._header.append(said)
            self._raw.append(said)
        if said and not self._has_channel and not _may_be_header("".join(self._header)):
            self._say("".join(self._raw), events)
            self._enter(TextEvent)
            return mark
        self._has_begun = self._has_begun or bool(mark)
        if mark == MESSAGE:
            self._begin_body("".join(self._header), events)
        elif mark == CHANNEL:
            self._header.append(mark)
            self._raw.append(mark)
            self._has_channel, self._splitter = True, MarkSplitter(START, MESSAGE, *_ENDS)
        elif mark:
            self._say("".join(self._raw), events)
            self._begin_header(mark == START)
        return ""

    def _say(self, text: str, events: list[Event]) -> None:
        if text.strip() or (text and not self._has_begun):
            events.append(TextEvent(text))

    # ---- messages ------------------------------------------------------------------------------------

    def _begin_body(self, header: str, events: list[Event]) -> None:
        role, _, channel = header.partition(CHANNEL)
        is_thought = channel.lstrip().startswith("analysis")
        name = self._called(f"{role} {channel}", is_thought)
        if name:
            self._index, self._closed = self._index + 1, False
            events.append(CallEvent(self._index, name))
            self._enter(partial(ArgumentsEvent, self._index))
        else:
            self._enter(ThoughtEvent if is_thought and self._context.splits_thoughts else TextEvent)
        self._calls, self._is_blank = bool(name), True

    def _called(self, header: str, is_thought: bool) -> str:
        """Returns the function that a header's message calls; "" for a message to the user or to itself."""
        recipient = _RECIPIENT.search(header)
        if recipient is None or not self._context.reads_calls:
            return ""
        name = recipient[1].removeprefix(_NAMESPACE)
        return name if name != recipient[1] or name in self._context.schemas else ""

    def _enter(self, tell: Callable[[str], Event]) -> None:
        self._is_header, self._tell, self._calls = False, tell, False
        self._splitter = MarkSplitter(START, *_ENDS)

    def _body(self, said: str, mark: str, events: list[Event]) -> str:
        if said:
            events.append(self._tell(said))
            self._is_blank = self._is_blank and not said.strip()
        if mark:
            self._has_begun = True
            if self._calls:
                self._closed = True
                events += [ArgumentsEvent(self._index, "{}")] if self._is_blank else []
            self._begin_header(mark == START)
        return ""

    _is_blank = True  # whether the message has no text so far


def _may_be_header(text: str) -> bool:
    """Returns whether ``text`` may become what stands before a channel: a role, and perhaps a recipient."""
    if len(text) > _MOST_HEADER:
        return False
    text = text.lstrip()
    if "assistant".startswith(text):
        return True
    text = text.removeprefix("assistant").lstrip()
    return "to=".startswith(text) or (text.startswith("to=") and "\n" not in text)


def lazy_rules(name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer of messages in which one to a function has its arguments
    (``lazy_calls.LazyRules``). A call is the last message, because models end there.

    Raises UnboundSchema for a tokenizer that writes the marks as text.
    """
    if any(syntax.special(mark) is None for mark in (START, CHANNEL, CONSTRAIN, MESSAGE, END)):
        raise UnboundSchema(
            0, "a grammar knows Harmony's marks as special tokens, which the tokenizer doesn't have"
        )
    start, channel, message, end = map(syntax.mark, (START, CHANNEL, MESSAGE, END))
    tools = "".join(
        f"{name}_to_{at}: ({_recipient(tool)} {channel} {name}_called | {channel} {name}_called {_recipient(tool)})"
        f" {name}_type? {message} {json_of(arguments)}\n"
        for at, (tool, arguments) in enumerate(syntax.tools)
    )
    calls = " | ".join(f"{name}_to_{at}" for at in range(len(syntax.tools)))
    messages, next_one = f"{name}_said* ({name}_last | {calls})", f'{before} {end} {start} "assistant"'
    opened = f"{before} {end}? | {next_one} {messages}"
    return (
        f"{name}: {opened if syntax.opened else messages}\n"
        f"{name}_said: {channel} {name}_channel {message} {next_one}\n"
        f"{name}_last: {channel} {name}_channel {message} {before} {end}?\n"
        f'{name}_channel: "analysis" | "commentary" | "final"\n'
        f'{name}_called: "analysis" | "commentary"\n'
        f'{name}_type: / ?/ ({syntax.mark(CONSTRAIN)} "json" | "json")\n{tools}'
    )


def _recipient(tool: str) -> str:
    return json.dumps(f" to={_NAMESPACE}{tool}")


def make(context: ParserContext = ParserContext()) -> ToolParser:
    """Returns a parser for one answer."""
    return Harmony(context)
