"""Messages of a conversation as clients send them, converted to what chat templates take.

Knows nothing of models or templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from baton.protos.json import Json
from baton.router.api.body import Body, FailFastModel
from baton.router.api.large import require_light

HINTS = frozenset({"cache_control"})  # keys of a message about caching, which no template may show the model
PER_MESSAGE = 256  # characters whose encoding costs what rendering a message does


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


def size_of(messages: Sequence[ConversationMessage]) -> int:
    """Returns an estimate of the cost of rendering messages, in characters: their content, plus PER_MESSAGE
    each.
    """
    return sum(len(message.content or "") + PER_MESSAGE for message in messages)


class TextPart(BaseModel):
    """Describes a text part of a message's content, for the OpenAPI document."""

    type: Literal["text"]
    text: str


Content = Annotated[str | None, BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)]


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
        """Returns the call as chat templates take it; arguments that are valid JSON are decoded."""
        require_light(self.function.arguments, "messages")
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
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
        """A hint on a part of the content is one on the message: parts are joined."""
        parts = value.get("content") if isinstance(value, dict) else None
        hinted = isinstance(parts, list) and any(isinstance(part, dict) and HINTS & part.keys() for part in parts)
        return {**value, "cache_control": True} if isinstance(value, dict) and hinted else value

    @model_validator(mode="after")
    def _says_something(self) -> ConversationMessage:
        """Only an assistant may have said nothing: it made calls, or its thoughts stand elsewhere."""
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing: a message of role {self.role} has a string or text parts")
        return self

    @property
    def hinted(self) -> bool:
        """Returns whether the client marked the message, or a part of it, with ``cache_control``."""
        return bool(HINTS & (self.model_extra or {}).keys())

    def plain(self) -> Json:
        """Returns the message as chat templates take it: text content, and role "developer" changed to "system"."""
        role = "system" if self.role == "developer" else self.role
        rest = {name: value for name, value in (self.model_extra or {}).items() if name not in HINTS}
        if self.tool_calls:
            rest["tool_calls"] = [call.plain() for call in self.tool_calls]
        return {**rest, "role": role, "content": self.content or ""}
