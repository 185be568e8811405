"""Tools as clients declare them, and the grammar that makes a model call one where it must.

Knows nothing of any model's own call format (``tool_parsers``): a demanded call is plain JSON by grammar, so it is
valid whatever the model was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.protos.nouns import Grammar
from baton.router.api.body import Body
from baton.router.api.openai.schema_text import refusal_of, schema_text
from baton.router.api.openai.tool_schema import call_schema
from baton.router.api.request_body import RequestBody
from baton.router.text.call_json import CallParser
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, Event
from baton.router.text.tool_parsers import ToolParser

MAX_TOOLS = 128  # tools of one request, as OpenAI has it
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}
ANY: Json = {"type": "object"}


class Function(Body):
    """Describes a function that the model may call; ``parameters`` is a JSON schema, None for no parameters."""

    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class FlatFunction(Body):
    """Describes a function tool without a wrapper, as the Responses API has it."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    """Describes a tool: a function, wrapped as in OpenAI's API."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Names the function that ``tool_choice`` demands."""

    name: Name


class NamedChoice(Body):
    """Describes ``tool_choice`` as an object, which demands a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class ToolsBody(RequestBody):
    """Declares the fields of tool calling; raises InvalidRequest where they contradict each other."""

    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _choice_fits_the_tools(self) -> ToolsBody:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidRequest(f"tools has {twice!r} twice: give each function a name of its own", "tools")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise InvalidRequest("tool_choice is only allowed with tools", "tool_choice")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            text = f"tool_choice names {self.tool_choice.function.name!r}: tools has {', '.join(names)}"
            raise InvalidRequest(text, "tool_choice")
        return self

    @property
    def offered_tools(self) -> list[Json] | None:
        """Returns the tools that the chat template shows to the model; None without tools or for tool_choice
        "none".
        """
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def forced_grammar(self) -> Grammar | None:
        """Returns the grammar of the call that ``tool_choice`` demands; None if it demands none."""
        if isinstance(self.tool_choice, NamedChoice):
            return _schema(self._named(self.tool_choice.function.name))
        if self.tool_choice != "required":
            return None
        refusal = refusal_of([_parameters(tool) for tool in self.tools or ()])
        return Grammar("json_schema", refusal) if refusal else _schema(self._any_call())

    def strict_tools(self) -> list[tuple[str, Json]]:
        """Returns each tool's name and the JSON schema of its arguments: of a strict tool its parameters, of
        another one any object; [] unless the model may choose to call (``tool_choice`` "auto") and one is strict.
        """
        if next(unheld([tool.function for tool in self.tools or ()], self.tool_choice), None) is None:
            return []
        return [
            (tool.function.name, _parameters(tool) if tool.function.strict else ANY) for tool in self.tools or ()
        ]

    def forced_parser(self) -> ToolParser:
        """Returns the parser of answers that follow ``forced_grammar``'s grammar."""
        if isinstance(self.tool_choice, NamedChoice):
            return SingleCallParser(self.tool_choice.function.name)
        return CallListParser()

    def _named(self, name: str) -> Json:
        return next(_parameters(t) for t in self.tools or () if t.function.name == name)

    def _any_call(self) -> Json:
        call = call_schema([(tool.function.name, _parameters(tool)) for tool in self.tools or ()], "parameters")
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        items = {"anyOf": call["anyOf"]}
        return {"type": "array", "minItems": 1, **most, "items": items, "$defs": call["$defs"]}


class SingleCallParser:
    """Parses an answer that is, as a whole, the arguments of a call of function ``name``."""

    def __init__(self, name: str) -> None:
        self._begin: list[Event] = [CallEvent(0, name)]

    @property
    def closed(self) -> bool:
        """Returns False, because the arguments, which are all of the text, show it themselves."""
        return False

    def push(self, text: str) -> list[Event]:
        """Returns the events of ``text``, the next part of the answer; the first non-empty one begins the call."""
        if not text:
            return []
        events, self._begin = [*self._begin, ArgumentsEvent(0, text)], []
        return events

    def flush(self) -> list[Event]:
        """Returns no event, because no text is held back."""
        return []


class CallListParser:
    """Parses an answer that is, as a whole, a JSON array of calls."""

    def __init__(self) -> None:
        self._calls = CallParser()

    @property
    def closed(self) -> bool:
        """Returns whether the whole list has come."""
        return self._calls.done

    def push(self, text: str) -> list[Event]:
        """Returns the events that ``text``, the next part of the answer, completes."""
        return self._calls.push(text)[0]

    def flush(self) -> list[Event]:
        """Returns no event, because no text is held back."""
        return []


def unheld(tools: Iterable[Function | FlatFunction], choice: object, inside: str = "") -> Iterator[str]:
    """Yields the names of ``strict`` fields that nothing holds an answer to unless a lazy grammar does
    (``strict_tools``): no call is demanded, and the model writes calls in a format of its own. ``inside`` stands
    between a tool's number and the field's name.
    """
    if choice in (None, "auto"):
        yield from (f"tools.{at}.{inside}strict" for at, tool in enumerate(tools) if tool.strict)


def _schema(schema: Json) -> Grammar:
    return Grammar("json_schema", schema_text(schema))


def _parameters(tool: Tool) -> Json:
    return NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters
