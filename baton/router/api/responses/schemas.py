"""The body of ``/v1/responses``, and its conversion to a chat body.

Knows nothing of models or streams. Stateless: nothing is stored, so nothing earlier can be referred to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.router.api.body import Body, read_body_of
from baton.router.api.openai.messages import THOUGHTS, of_current_turn
from baton.router.api.openai.schemas import ChatBody, SamplingBody, StreamOptions
from baton.router.api.openai.tools import FlatFunction, Name, unheld
from baton.router.api.request_body import RequestBody

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


class TextFormat(Body):
    """Describes ``text.format``, the form that the answer must have; it is flat, unlike chat's
    ``response_format``.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class TextOptions(RequestBody):
    """Describes ``text``, the options of the answer's text."""

    inside: ClassVar[str] = "text."

    format: TextFormat | None = None


class Reasoning(RequestBody):
    """Describes ``reasoning``, the options of the model's thinking; reasoning is returned whole."""

    surface: ClassVar[str] = "reasoning"
    inside: ClassVar[str] = "reasoning."

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class FlatChoice(Body):
    """Describes ``tool_choice`` as an object, which demands a call of function ``name``."""

    type: Literal["function"]
    name: Name


class ResponsesBody(SamplingBody):
    """Describes the body of POST /v1/responses.

    Of what ``include`` may name, only logprobs has an effect; the rest belongs to tools that aren't supported.
    """

    surface: ClassVar[str] = "responses"

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: list[FlatFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[Includable] | None = None
    top_logprobs: int | None = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: Json | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> ResponsesBody:
        if self.top_logprobs and not self.wants_logprobs:
            text = f"top_logprobs is only allowed with include: [{LOGPROBS!r}]"
            raise InvalidRequest(text, "top_logprobs")
        constraint = self.grammar()
        if constraint is not None and self._format() not in (None, {"type": "text"}):
            raise InvalidRequest(f"give one of text.format and {constraint[1]}, not both", constraint[1])
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Returns whether the client asked, by ``include``, for the logprobs of the answer's tokens."""
        return LOGPROBS in (self.include or ())

    def ignored(self) -> Iterator[str]:
        """Yields the names of fields without effect: unknown ones, and ``strict`` of tools where no call is
        demanded.
        """
        yield from super().ignored()
        yield from unheld(self.tools or (), self.tool_choice)

    def chat(self) -> ChatBody:
        """Returns the equivalent chat body. Raises InvalidRequest naming the input item at fault."""
        said: Json = {"messages": self._messages()}
        for name, field in SamplingBody.model_fields.items():
            said[field.alias or name] = getattr(self, name)
        said |= {name: getattr(self, name) for name in ("parallel_tool_calls", "chat_template_kwargs")}
        if self.wants_logprobs:
            said |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        said["reasoning_effort"] = self.reasoning.effort if self.reasoning else None
        said["max_completion_tokens"] = self.max_output_tokens
        said["response_format"] = self._format()
        said["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()
        ]
        said["tool_choice"] = self._choice()
        return read_body_of(ChatBody, {name: value for name, value in said.items() if value not in (None, [])})

    def _choice(self) -> object:
        if isinstance(self.tool_choice, FlatChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _format(self) -> Json | None:
        asked = self.text.format if self.text else None
        if asked is None:
            return None
        if asked.type != "json_schema":
            return {"type": asked.type}
        if asked.schema_ is None:
            raise InvalidRequest("text.format.schema is missing: give it", "text.format.schema")
        return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for at, item in enumerate(self.input):
            _add_item(messages, item, f"input[{at}]")
        messages = [message for message in messages if set(message) != _THOUGHT]
        if not messages:
            raise InvalidRequest("input is empty: give at least one message", "input")
        return of_current_turn(messages)


def _add_item(messages: list[Json], item: Json, param: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequest(
                f"{param}.role is {role!r}: give user, assistant, system or developer", f"{param}.role"
            )
        thought = messages.pop() if role == "assistant" and _is_thought(messages) else {}
        messages.append({**thought, "role": role, "content": _text(item.get("content"), f"{param}.content")})
    elif kind == "function_call":
        call = {
            "id": _string(item, "call_id", param),
            "type": "function",
            "function": {"name": _string(item, "name", param), "arguments": _string(item, "arguments", param)},
        }
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant"})
        messages[-1].setdefault("content", "")
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", param), "content": output})
    elif kind == "reasoning":
        if said := _thought(item):
            before = messages.pop()[THOUGHTS] if _is_thought(messages) else ""
            messages.append({"role": "assistant", THOUGHTS: before + said})
    else:
        text = f"{param}.type is {kind!r}: give message, function_call, function_call_output or reasoning"
        raise InvalidRequest(text, f"{param}.type")


_THOUGHT = {"role", THOUGHTS}  # keys of a thought that no call or text has followed yet


def _is_thought(messages: list[Json]) -> bool:
    return bool(messages) and set(messages[-1]) == _THOUGHT


def _thought(item: Json) -> str:
    """Returns the text of a reasoning item; its summary is no thought."""
    parts = item.get("content")
    texts = (part.get("text") for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
    return "".join(text for text in texts if isinstance(text, str))


def _string(item: Json, key: str, param: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}.{key} should be a string", f"{param}.{key}")
    return value


def _text(content: object, param: str) -> str:
    """A string, or text parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} should be a string or an array of text parts", param)
    for at, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)):
            text = f'{param}[{at}] should be {{"type": "input_text", "text": …}}: this model reads text only'
            raise InvalidRequest(text, f"{param}[{at}]")
    return "".join(part["text"] for part in content)
