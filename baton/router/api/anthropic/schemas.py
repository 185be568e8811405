"""The bodies of Anthropic's Messages API, and their conversion to a chat body.

Knows nothing of models or streams. https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.router.api.anthropic.conversation import chat_messages
from baton.router.api.body import Body, read_body_of
from baton.router.api.openai.breakpoints import Marks, mark_of
from baton.router.api.openai.conversation import THINKING
from baton.router.api.openai.schemas import ChatBody, SamplingBody
from baton.router.api.openai.tools import MAX_TOOLS, Name
from baton.router.api.request_body import RequestBody

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
UNSHOWN = {
    "input_examples": "write the examples into the description",
    "defer_loading": "every tool is shown to the model at once, because none looks for tools",
}
"""Fields of a tool that would change what the model sees of it, with what to do instead."""
NO_SERVER_TOOLS = "no tool runs here: give name and input_schema, and run what the answer calls"


class ClientTool(Body):
    """Describes a tool that the client runs; ``input_schema`` is a JSON schema of the call's input.

    ``strict`` asks that every call follows it.
    """

    type: str | None = None
    name: Name
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None
    cache_control: object = None
    input_examples: object = None
    defer_loading: object = None

    def function(self, at: int) -> Json:
        """Returns the tool as chat bodies declare it; ``at`` is its place.

        Raises InvalidRequest for a tool that Anthropic's servers would run, and for one that isn't shown as it is.
        """
        if self.type not in (None, "custom"):
            raise InvalidRequest(f"tools[{at}].type is {self.type!r}: {NO_SERVER_TOOLS}", f"tools[{at}].type")
        for name, remedy in UNSHOWN.items():
            if getattr(self, name):
                raise InvalidRequest(f"tools[{at}].{name} is not supported: {remedy}", f"tools[{at}].{name}")
        told: Json = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        told["strict"] = self.strict or None
        return {"type": "function", "function": {name: value for name, value in told.items() if value is not None}}


class ToolChoice(Body):
    """Describes ``tool_choice``: "any" demands a call, "tool" a call of ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def demands(self) -> bool:
        """Returns whether the answer has to be a call."""
        return self.type in ("any", "tool")

    @property
    def chosen(self) -> object:
        """Returns the choice as chat bodies have it."""
        if self.type != "tool":
            return CHOICES[self.type]
        if self.name is None:
            raise InvalidRequest("tool_choice.name is missing: give the tool's", "tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(RequestBody):
    """Describes ``thinking``: whether the model thinks before it answers.

    The client's ``budget_tokens``, a target in Anthropic's API, bounds nothing here: ``max_tokens`` does.
    """

    surface: ClassVar[str] = "thinking"
    inside: ClassVar[str] = "thinking."

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_on(self) -> bool:
        """Returns whether the model may think."""
        return self.type != "disabled"

    @property
    def is_shown(self) -> bool:
        """Returns whether thoughts are part of the answer."""
        return self.is_on and self.display != "omitted"


class OutputFormat(Body):
    """Describes ``output_config.format``, the JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(RequestBody):
    """Describes ``output_config``: the answer's form, and how much the model should think."""

    surface: ClassVar[str] = "output_config"
    inside: ClassVar[str] = "output_config."

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesPrompt(RequestBody):
    """Declares the fields of which the prompt is made; the last message, if it is the assistant's, is continued."""

    messages: list[Json] = Field(min_length=1)
    system: str | list[Json] | None = None
    tools: list[ClientTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Json | None = None

    @property
    def blocks(self) -> int:
        """Returns how many blocks the system's text and the messages have; a string is one."""
        said = [self.system, *(message.get("content") for message in self.messages)]
        return sum(len(content) if isinstance(content, list) else 1 for content in said)

    def prompt(self) -> Json:
        """Returns the fields of a chat body that make the same prompt. Raises InvalidRequest."""
        messages = chat_messages(self.system, self.messages)
        said: Json = {"messages": messages, "chat_template_kwargs": self._switches()}
        said["tools"] = [tool.function(at) for at, tool in enumerate(self.tools or ())]
        if self.tool_choice is not None:
            said["tool_choice"] = self.tool_choice.chosen
            said["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None:
            said["reasoning_effort"] = self.output_config.effort
        if messages[-1]["role"] == "assistant":
            said["continue_final_message"] = _continued(messages[-1], f"messages[{len(self.messages) - 1}]")
        return said

    def _switches(self) -> Json:
        """Returns the template's switches, those of ``thinking`` among them."""
        thinks = {} if self.thinking is None else dict.fromkeys(THINKING, self.thinking.is_on)
        return thinks | (self.chat_template_kwargs or {})


class CountTokensBody(MessagesPrompt):
    """Describes the body of POST /v1/messages/count_tokens."""

    surface: ClassVar[str] = "count_tokens"

    model: str | None = None

    def chat(self) -> ChatBody:
        """Returns a chat body of the same prompt. Raises InvalidRequest."""
        return _chat_body(self.prompt() | {"model": self.model})


class MessagesBody(SamplingBody, MessagesPrompt):
    """Describes the body of POST /v1/messages; fields that Anthropic's API lacks are those of the chat endpoint."""

    surface: ClassVar[str] = "messages"

    max_tokens: int
    stop_sequences: list[str] | None = None
    cache_control: object = None

    @model_validator(mode="after")
    def _one_constraint(self) -> MessagesBody:
        constraint = self.grammar()
        if constraint is not None and self._form() is not None:
            name = constraint[1]
            raise InvalidRequest(f"give one of output_config.format and {name}, not both", name)
        if self._form() is not None and self.tool_choice is not None and self.tool_choice.demands:
            name = "output_config.format"
            raise InvalidRequest(f"{name} can't go with a tool_choice that demands a call", name)
        return self

    def chat(self) -> ChatBody:
        """Returns the equivalent chat body. Raises InvalidRequest."""
        said = {field.alias or name: getattr(self, name) for name, field in SamplingBody.model_fields.items()}
        said |= self.prompt() | {"max_tokens": self.max_tokens, "response_format": self._form()}
        self._mark(said["messages"])
        said["stop"] = [*self.stop, *(self.stop_sequences or ())]
        said["include_reasoning"] = self.thinking is None or self.thinking.is_shown
        return _chat_body(said)

    def _mark(self, messages: list[Json]) -> None:
        """Adds the breakpoints of the cache that stand on tools and on the whole prompt.

        Templates show tools before the conversation or in the system's message. So a tool's breakpoint stands
        behind that message, or before the first one if it is another's.
        """
        tools = [tool.cache_control for tool in self.tools or () if tool.cache_control is not None]
        if tools:
            chars = None if messages[0]["role"] == "system" else 0
            messages[0]["cache_control"] = Marks([mark_of(tools[-1], chars), *messages[0].get("cache_control", ())])
        if self.cache_control is not None:
            whole = mark_of(self.cache_control)
            messages[-1]["cache_control"] = Marks([*messages[-1].get("cache_control", ()), whole])

    def _form(self) -> Json | None:
        asked = self.output_config.format if self.output_config else None
        return None if asked is None else {"type": "json_schema", "json_schema": {"schema": asked.schema_}}


def _continued(message: Json, param: str) -> bool:
    """Checks that the last message can be continued; returns True. Raises InvalidRequest."""
    if "tool_calls" in message:
        text = f"{param} calls a tool: give its tool_result in a user message behind it"
        raise InvalidRequest(text, param)
    return True


def _chat_body(said: Json) -> ChatBody:
    return read_body_of(ChatBody, {name: value for name, value in said.items() if value not in (None, [], {})})
