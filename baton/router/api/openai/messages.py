"""Messages of a conversation as clients send them, converted to what chat templates take.

Knows nothing of models or templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from baton.protos.json import Json
from baton.router.api.body import Body, FailFastModel
from baton.router.api.openai.breakpoints import Marks, mark_of
from baton.router.text.surrogates import whole_pairs

HINT = "cache_control"
HINTS = frozenset({HINT})  # keys of a message about caching, which no template may show the model
UNSEEN = {
    "function_call": "give tool_calls",
    "refusal": "give what was said as content",
    "audio": "give its transcript as content",
}
"""Keys of an assistant's message with what it said that templates don't read, and what to give instead."""
PER_MESSAGE = 256  # characters whose encoding costs what rendering a message or a call does


def _content(value: object) -> str | None:
    """A message's content as text: a string as it is, text parts joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("should be a string or an array of text parts")
    for at, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'part {at} should be {{"type": "text", "text": …}}: this model reads text only')
    return "".join(part["text"] for part in value)


def _marks_of_parts(parts: object) -> Iterator[Json]:
    """Yields the marks of text parts, each behind the characters up to its part's end."""
    chars = 0
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return  # refused elsewhere
        chars += len(part["text"])
        if part.get(HINT) is not None:
            yield mark_of(part[HINT], chars)


def _own_marks(message: Json) -> list[Json]:
    """Returns the marks of a message: those that another surface has made, or its own behind all of it."""
    given = message.get(HINT)
    if isinstance(given, Marks):
        return list(given)
    return [] if given is None else [mark_of(given)]


THOUGHTS = "reasoning_content"  # a message's key, as chat templates have it


def of_current_turn(messages: list[Json]) -> list[Json]:
    """Returns messages without the thoughts of earlier turns: those before the last message of the user.

    The thoughts between the calls of the current turn stay, because the model goes on with them.
    """
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for message in messages[: last + 1]:
        message.pop(THOUGHTS, None)
    return messages


def size_of(messages: Sequence[ConversationMessage]) -> int:
    """Returns an estimate of the cost of rendering messages, in characters: their content and their calls'
    arguments, plus PER_MESSAGE for each message and call.
    """
    return sum(map(_size_of_one, messages))


def _size_of_one(message: ConversationMessage) -> int:
    calls = sum(len(call.function.arguments) + PER_MESSAGE for call in message.tool_calls or ())
    return len(message.content or "") + calls + PER_MESSAGE


class TextPart(BaseModel):
    """Describes a text part of a message's content, for the OpenAPI document."""

    type: Literal["text"]
    text: str


Content = Annotated[str | None, BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)]


class Arguments(dict[str, object]):
    """Holds the arguments of an earlier call as chat templates take them: an object, or ``text`` where a template
    joins them to text.
    """

    def __init__(self, given: Json, text: str) -> None:
        super().__init__(given)
        self._text = text

    def __radd__(self, before: str) -> str:
        return before + self._text

    def __add__(self, behind: str) -> str:
        return self._text + behind


class PastFunction(Body):
    """Names a function that an earlier answer called; ``arguments`` is JSON text."""

    name: str
    arguments: str = ""


class PastCall(Body):
    """Describes a tool call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: PastFunction

    def plain(self) -> Json:
        """Returns the call as chat templates take it; arguments that are valid JSON are decoded, however long."""
        text = whole_pairs(self.function.arguments) or "{}"
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        if isinstance(arguments, dict):
            arguments = Arguments(arguments, text)
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ConversationMessage(FailFastModel):
    """Describes one message of a conversation.

    Further keys (name, tool_call_id, …) are passed to the chat template unchanged.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: list[PastCall] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_hints_of_parts(cls, value: object) -> object:
        """Keeps hints on the message and on parts of its content, which are joined, as a list of marks."""
        if not isinstance(value, dict):
            return value
        marks = [*_marks_of_parts(value.get("content")), *_own_marks(value)]
        rest = {name: given for name, given in value.items() if name not in HINTS}
        return {**rest, HINT: marks} if marks else rest

    @model_validator(mode="after")
    def _says_something(self) -> ConversationMessage:
        """Only an assistant may have said nothing: it made calls, or its thoughts stand elsewhere."""
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing: a message of role {self.role} has a string or text parts")
        for name, remedy in UNSEEN.items() if self.role == "assistant" else ():
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} of an earlier answer is not shown to the model: {remedy}")
        return self

    @property
    def hinted(self) -> bool:
        """Returns whether the client marked the message, or a part of it, with ``cache_control``."""
        return bool(self.marks)

    @property
    def marks(self) -> list[Json]:
        """Returns the breakpoints of the cache in the message, as ``breakpoints.mark_of`` makes them."""
        found: list[Json] = (self.model_extra or {}).get(HINT, [])
        return found

    def before(self, chars: int | None) -> ConversationMessage:
        """Returns the message with the first ``chars`` characters of its content alone; all of it for None."""
        if chars is None or self.content is None or chars >= len(self.content):
            return self
        return self.model_copy(update={"content": self.content[:chars]})

    def plain(self) -> Json:
        """Returns the message as chat templates take it: text content, and role "developer" changed to "system".

        The thoughts before calls are ``thinking``, too, as gpt-oss's template has it beside no content.
        """
        role = "system" if self.role == "developer" else self.role
        rest = {name: value for name, value in (self.model_extra or {}).items() if name not in HINTS}
        if self.tool_calls:
            rest["tool_calls"] = [call.plain() for call in self.tool_calls]
            if rest.get("reasoning_content") and not self.content:
                rest.setdefault("thinking", rest["reasoning_content"])
        return {**rest, "role": role, "content": self.content or ""}
