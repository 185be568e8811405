"""The bodies clients send, as types: OpenAI's fields and the extensions that vLLM's users know.

Knows nothing of models, limits or ranges (``validate.py``). Unknown fields are ignored; a wrong type is an error
that names the field; a field whose effect we can't give is refused rather than ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from baton.protos.errors import InvalidRequest

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """``value`` in one of the four forms of a prompt, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("should be a string, an array of token ids, or an array of either")
    if all(type(item) is int for item in value):
        return [value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(i) is int for i in item)):
            raise ValueError("should hold only token ids (integers), only strings, or only arrays of token ids")
    return value


def _stops(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value if value is not None else []


Prompts = Annotated[list[Prompt], BeforeValidator(_prompts)]
Stops = Annotated[list[str], BeforeValidator(_stops)]


class Body(BaseModel):
    """Strict types: "16" is no number, 1 is no boolean; NaN and infinities are refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    """``include_usage``: one more chunk with the usage and no choices."""

    include_usage: bool | None = None


class ResponseFormat(Body):
    """Only plain text so far."""

    type: Literal["text"]


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stop: Stops = []
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, max_length=256)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        return self

    def sampling(self) -> dict[str, Any]:
        """The sampling fields that the client set, as ``validate.resolve_sampling`` takes them."""
        return {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos",
)  # fmt: skip


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _only_what_we_can_do(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of other than n is not supported: leave it out", "best_of")
        if self.suffix:
            raise InvalidRequest("suffix is not supported: leave it out", "suffix")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo with logprobs is not supported: leave one of them out", "echo")
        return self

    def sampling(self) -> dict[str, Any]:
        """``logprobs`` is the number of alternatives."""
        return super().sampling() | ({} if self.logprobs is None else {"logprobs": self.logprobs})


def _content(value: Any) -> str | None:
    """A message's content as text: a string as it is, text parts joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("should be a string or an array of text parts")
    for at, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'part {at} should be {{"type": "text", "text": …}}: this model reads text only')
    return "".join(part["text"] for part in value)


Content = Annotated[str | None, BeforeValidator(_content)]


class Message(BaseModel):
    """One turn. Further keys (name, tool_calls, …) go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None

    def plain(self) -> dict[str, Any]:
        """As templates want it: text content, "developer" as the "system" that models were trained with."""
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": self.content or ""}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. ``chat_template_kwargs``: the template's own switches (enable_thinking, …)."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None

    @field_validator("logprobs")
    @classmethod
    def _zero_is_false(cls, value: bool | int | None) -> bool:
        if type(value) is int and value not in (0, 1):
            raise ValueError("should be a boolean; top_logprobs says how many")
        return bool(value)

    @model_validator(mode="after")
    def _only_what_we_can_do(self) -> ChatBody:
        if self.tools or self.functions:
            raise InvalidRequest("tools are not supported: leave them out", "tools" if self.tools else "functions")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        return self

    def sampling(self) -> dict[str, Any]:
        """``max_completion_tokens`` is the newer name of ``max_tokens``; ``top_logprobs`` the alternatives."""
        ask = super().sampling()
        if self.max_completion_tokens is not None:
            ask["max_tokens"] = self.max_completion_tokens
        return ask | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


SCHEMA_REF = "#/components/schemas/{model}"
B = TypeVar("B", bound=Body)


def body_docs(kind: type[Body]) -> dict[str, Any]:
    """An endpoint's part of the OpenAPI document; ``app.py`` adds the schema it points to."""
    schema = {"$ref": SCHEMA_REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parse_body(kind: type[B], raw: bytes) -> B:
    """``raw`` as JSON of ``kind``. Raises InvalidRequest naming the first field at fault."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _path(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{param}: {message}" if param else message, param) from None


def _path(loc: tuple[int | str, ...]) -> str:
    """A field's path as OpenAI writes it: messages[0].content."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_ARMS and not part.startswith("list["):
            path += f".{part}" if path else part
    return path


_UNION_ARMS = frozenset({"str", "int", "bool", "float", "[key]"})
