"""Types of the bodies that clients send: OpenAI's fields and vLLM's extensions.

Knows nothing of models, limits or ranges (``validate.py``). A wrong type is an error that names the field; a field
whose effect can't be given is refused (``foreign_fields``), an unknown one is named in a header of the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.protos.nouns import Grammar
from baton.router.answer.validate import COMPLETION_TOKENS
from baton.router.api.body import SCHEMA_REF, Body, body_docs, parse_body
from baton.router.api.openai.conversation import ConversationBody
from baton.router.api.openai.messages import ConversationMessage, TextPart
from baton.router.api.openai.structured import ConstrainedBody, StructuredBody
from baton.router.api.openai.tools import unheld
from baton.router.api.openai.truncation import TruncatedBody
from baton.router.api.request_body import RequestBody

__all__ = [
    "SCHEMA_REF",
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "TokenizeBody",
    "body_docs",
    "parse_body",
]

Prompt = str | list[int]
LONG_RETENTION = "24h"  # of prompt_cache_retention: the prefix should outlast what is kept anyway
MAX_DRAFTS_NAME = "speculative.n_max"  # as llama.cpp's server has it


def _prompts(value: object) -> list[Prompt]:
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


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value if value is not None else []


AnyPrompt = str | list[int] | list[str] | list[list[int]]
Prompts = Annotated[list[Prompt], BeforeValidator(_prompts, json_schema_input_type=AnyPrompt)]
TokenId = Annotated[int, Field(strict=False)]  # a key of a JSON object, which is text
Stops = Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str] | None)]


class StreamOptions(RequestBody):
    """Describes ``stream_options``: whether a last chunk gives the usage, and whether each chunk gives the usage so
    far.
    """

    inside: ClassVar[str] = "stream_options."

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Prediction(RequestBody):
    """Holds the answer that the client expects (OpenAI's predicted outputs), which drafts may be taken from."""

    inside: ClassVar[str] = "prediction."

    type: Literal["content"] = "content"
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """Returns the expected answer."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SamplingBody(ConstrainedBody):
    """Declares fields that all generating bodies share: sampling, where answers end, priority and caching."""

    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stop: Stops = []
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, max_length=256)
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    prompt_cache_retention: object = None
    session_id: str | None = Field(default=None, max_length=256)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prediction: Prediction | None = None
    max_drafts: int | None = Field(default=None, alias="speculative.n_max")


class GenerationBody(SamplingBody, StructuredBody, TruncatedBody):
    """Declares the fields that completions and chat have in common."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs can't be streamed: leave stream out", "prompt_logprobs")
        return self

    def sampling(self) -> Json:
        """Returns the sampling fields that the client set, as ``validate.resolve_sampling`` takes them."""
        fields = {name: value for name in SAMPLING_FIELDS if (value := self._first(name)) is not None}
        grammar = self.grammar()
        return fields if grammar is None else fields | {"grammar": grammar[0]}

    def names(self) -> dict[str, str]:
        """Returns the client's names of sampling fields that differ from ours, by our names."""
        grammar = self.grammar()
        return {"max_drafts": MAX_DRAFTS_NAME} | ({} if grammar is None else {"grammar": grammar[1]})

    def _first(self, name: str) -> object:
        """A field's value, or what ``nvext`` says under that name."""
        value = getattr(self, name)
        return getattr(self.nvext, name, None) if value is None and self.nvext is not None else value

    @property
    def session(self) -> str:
        """Returns the client's id of the conversation that the request belongs to; "" for none."""
        return self.prompt_cache_key or self.session_id or ""

    @property
    def retained(self) -> bool:
        """Returns whether the client hints, by prompt_cache_retention "24h", that it will reuse the prompt's
        beginning.
        """
        return self.prompt_cache_retention == LONG_RETENTION

    @property
    def include_usage(self) -> bool:
        """Returns whether a stream's last chunk gives the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Returns whether each chunk of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids",
    "prompt_logprobs", "max_drafts",
)  # fmt: skip


class CompletionBody(GenerationBody):
    """Describes the body of POST /v1/completions."""

    surface: ClassVar[str] = "completions"

    id_lists: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _only_what_we_can_do(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.returned_choices:
            raise InvalidRequest(
                f"best_of is {self.best_of}: it can't be below n, {self.returned_choices}", "best_of"
            )
        if self.is_best_of and self.stream:
            raise InvalidRequest("best_of over n can't be streamed: leave one of them out", "best_of")
        return self

    @property
    def returned_choices(self) -> int:
        """Returns the number of choices of each prompt that are returned to the client."""
        return 1 if self.n is None else self.n

    @property
    def is_best_of(self) -> bool:
        """Returns whether more answers are generated than are returned (``best_of`` over ``n``)."""
        return self.best_of is not None and self.best_of > self.returned_choices

    @property
    def prompt_only(self) -> bool:
        """Returns whether only the prompt is to be returned (``echo`` with max_tokens 0), with logprobs if asked
        for.
        """
        return bool(self.echo) and self.max_tokens == 0

    @property
    def answer_tokens(self) -> int:
        """Returns the tokens of context to keep free for the answer: max_tokens or its default, at least 1."""
        return COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    def sampling(self) -> Json:
        """Returns the sampling fields; ``logprobs`` is the number of alternatives per token, with ``echo`` also the
        prompt's.
        """
        asked = 0 if self.is_best_of and self.logprobs is None else self.logprobs
        fields = super().sampling() | ({} if asked is None else {"logprobs": asked})
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return fields | ({"max_tokens": 1} if self.prompt_only else {})


class ChatBody(GenerationBody, ConversationBody):
    """Describes the body of POST /v1/chat/completions."""

    surface: ClassVar[str] = "chat"

    messages: list[ConversationMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None

    @field_validator("logprobs")
    @classmethod
    def _zero_is_false(cls, value: bool | int | None) -> bool:
        if type(value) is int and value not in (0, 1):
            raise ValueError("should be a boolean; top_logprobs says how many")
        return bool(value)

    @model_validator(mode="after")
    def _only_what_we_can_do(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        return self

    def grammar(self) -> tuple[Grammar, str] | None:
        """Returns the grammar that the answer must match and the name of the field that asks for it, or None.

        A demanded tool call is a grammar too. Raises InvalidRequest for more than one.
        """
        asked, forced = super().grammar(), self.forced_grammar()
        if forced is None:
            return asked
        if asked is not None:
            raise InvalidRequest(f"{asked[1]} can't go with a tool_choice that demands a call", asked[1])
        return forced, "tools"

    def refuse_unheld(self) -> None:
        """Raises InvalidRequest if a tool is strict and only a demanded call would follow its schema."""
        name = next(unheld([tool.function for tool in self.tools or ()], self.tool_choice), "")
        if name:
            shown = f"tools[{name.split('.')[1]}].strict"
            text = "nothing can hold this call's answer to a schema where the model chooses to call"
            remedy = "set the type of tool_choice to any or tool, or leave strict out"
            raise InvalidRequest(f"{shown}: {text}: {remedy}", shown)

    def ignored(self) -> Iterator[str]:
        """Yields the names of fields without effect: unknown ones, and ``strict`` of tools where no call is
        demanded.
        """
        yield from super().ignored()
        yield from unheld([tool.function for tool in self.tools or ()], self.tool_choice, "function.")

    @property
    def retained(self) -> bool:
        """Returns whether the client hints, by prompt_cache_retention or a message's ``cache_control``, that it
        will reuse the prompt's beginning.
        """
        return self.retains_all or any(message.hinted for message in self.messages)

    @property
    def retains_all(self) -> bool:
        """Returns whether the client hints, by prompt_cache_retention, that it will reuse all of the prompt."""
        return super().retained

    @property
    def answer_tokens(self) -> int:
        """Returns the tokens of context to keep free for the answer: its max_tokens if given, at least 1."""
        return max(1, self.max_completion_tokens or self.max_tokens or 1)

    def sampling(self) -> Json:
        """Returns the sampling fields; ``max_completion_tokens`` is the newer name of ``max_tokens``."""
        fields = super().sampling()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        return fields | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})


class TokenizeBody(ConversationBody):
    """Describes the body of POST /tokenize: a prompt (special tokens are added by default) or a conversation (they
    are not).
    """

    surface: ClassVar[str] = "tokenize"

    model: str | None = None
    prompt: str | None = None
    messages: list[ConversationMessage] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self


class DetokenizeBody(RequestBody):
    """Describes the body of POST /detokenize."""

    surface: ClassVar[str] = "detokenize"

    model: str | None = None
    id_lists: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: list[int]
    skip_special_tokens: bool = False
