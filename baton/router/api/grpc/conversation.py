"""Conversion of a gRPC conversation to a chat body, so that it is prepared as one of REST's.

Knows nothing of models or answers. Texts that hold JSON are weighed before they are parsed, as bodies are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from pydantic import PrivateAttr

from baton.protos.convert import sampling_fields
from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.protos.nouns import Grammar
from baton.protos.v1 import inference_pb2 as pb
from baton.router.answer.validate import check_count
from baton.router.api.body import read_body_of
from baton.router.api.large import require_light
from baton.router.api.openai.schemas import ChatBody
from baton.router.api.openai.tools import MAX_TOOLS

MAX_MESSAGES = 8192  # messages of a conversation, and calls of all of them
ROLES = ("system", "user", "assistant", "tool")
CHOICES = ("auto", "none", "required")
NAMES = {"prompt": "chat", "reasoning_effort": "chat.reasoning_effort", "parameters": "parameters"}


class GrpcChatBody(ChatBody):
    """Is a chat body whose sampling and grammar are those of a ``Sampling`` message, whatever they are called
    there.
    """

    _sampling: Json = PrivateAttr(default_factory=dict)

    def sampled(self, fields: Json) -> GrpcChatBody:
        """Returns this body with the sampling ``fields`` of ``convert.sampling_fields``."""
        self._sampling = fields
        return self

    def sampling(self) -> Json:
        """Returns the sampling fields that the message has, and the grammar of a demanded call."""
        grammar = self.grammar()
        return self._sampling if grammar is None else self._sampling | {"grammar": grammar[0]}

    def names(self) -> dict[str, str]:
        """Returns the field that asks for the grammar, if one does; others have our names."""
        grammar = self.grammar()
        return {} if grammar is None else {"grammar": grammar[1]}

    def _said(self) -> list[tuple[str, Grammar | None]]:
        return [("grammar", self._sampling.get("grammar"))]


def conversation_body(request: pb.GenerateRequest) -> GrpcChatBody:
    """Returns the chat body of a request whose prompt is a conversation. Raises InvalidRequest naming the field."""
    sampling = sampling_fields(request.sampling)
    asked = {
        "n": request.n or 1,
        "stop": list(request.stop),
        "max_tokens": sampling.get("max_tokens"),
        "allowed_token_ids": list(sampling["allowed_token_ids"]) if "allowed_token_ids" in sampling else None,
        "prediction": {"content": request.prediction} if request.prediction else None,
        "truncate_prompt_tokens": request.truncate_prompt_tokens or None,
        "truncation_side": request.truncation_side or None,
    }
    said = _of_chat(request.chat)
    try:
        body = read_body_of(GrpcChatBody, _given(asked) | said)
    except InvalidRequest as error:
        raise error if _field_of(error) in asked else _of_conversation(error) from None
    return body.sampled(sampling)


def _field_of(error: InvalidRequest) -> str:
    return re.split(r"[.\[]", error.param or "")[0]


def _of_chat(chat: pb.Conversation) -> Json:
    check_count("chat.messages", len(chat.messages), MAX_MESSAGES)
    check_count("chat.messages.tool_calls", sum(len(m.tool_calls) for m in chat.messages), MAX_MESSAGES)
    check_count("chat.tools", len(chat.tools), MAX_TOOLS)
    if not chat.messages:
        raise InvalidRequest("chat.messages is empty: give at least one", "chat.messages")
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
    return _given(
        {
            "messages": [_message(at, message) for at, message in enumerate(chat.messages)],
            "continue_final_message": chat.continue_final_message or None,
            "tools": [_tool(at, tool) for at, tool in enumerate(chat.tools)],
            "tool_choice": _choice(chat),
            "parallel_tool_calls": parallel,
            "reasoning_effort": chat.reasoning_effort or None,
            "chat_template_kwargs": _object(chat.chat_template_kwargs, "chat.chat_template_kwargs"),
        }
    )


def _message(at: int, message: pb.ChatMessage) -> Json:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"chat.messages[{at}].role is {message.role!r}: give one of {', '.join(ROLES)}", "chat.messages"
        )
    if message.tool_calls and message.role != "assistant":
        text = f"chat.messages[{at}].tool_calls: only a message of role assistant has calls"
        raise InvalidRequest(text, f"chat.messages[{at}].tool_calls")
    said: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return said | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})


def _tool(at: int, tool: pb.Tool) -> Json:
    function = {
        "name": tool.name,
        "description": tool.description or None,
        "parameters": _object(tool.parameters, f"chat.tools[{at}].parameters"),
        "strict": tool.strict or None,
    }
    return {"type": "function", "function": _given(function)}


def _choice(chat: pb.Conversation) -> object:
    if chat.demanded_tool:
        return {"type": "function", "function": {"name": chat.demanded_tool}}
    if chat.tool_choice and chat.tool_choice not in CHOICES:
        text = f"chat.tool_choice is {chat.tool_choice!r}: give one of {', '.join(CHOICES)}, or demanded_tool"
        raise InvalidRequest(text, "chat.tool_choice")
    return chat.tool_choice or None


def _object(text: str, param: str) -> Json | None:
    """Returns the JSON object that ``text`` is; None for no text."""
    if not text:
        return None
    require_light(text, param)
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{param} should be the text of a JSON object", param)
    return found


def _given(fields: Mapping[str, object]) -> Json:
    return {name: value for name, value in fields.items() if value not in (None, [])}


def _of_conversation(error: InvalidRequest) -> InvalidRequest:
    """Returns an error of a chat body as one of the conversation, whose tools and calls have no wrapper."""
    if not error.param:
        return error
    param = f"chat.{error.param.replace('.function', '')}"
    return InvalidRequest(error.message.replace(error.param, param, 1), param)
