"""Anthropic's Messages API over REST.

Knows nothing of how an answer is worded (``anthropic.shape``) or generated (``openai.prepared_call``).
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.router.answer.service import CHARS_PER_TOKEN, GenerationService
from baton.router.answer.validate import check_tokenized
from baton.router.api.anthropic.errors import PATH, anthropic_error
from baton.router.api.anthropic.schemas import CountTokensBody, MessagesBody
from baton.router.api.anthropic.shape import MessagesShape
from baton.router.api.disconnect import until_disconnect
from baton.router.api.errors import json_response
from baton.router.api.large import INLINE_BYTES, offload_if, parsed
from baton.router.api.limits import read_body
from baton.router.api.openai.messages import size_of
from baton.router.api.openai.prepared_call import CHAT_NAMES, Headers, PreparedCall, chat_generation, respond
from baton.router.api.openai.schemas import body_docs
from baton.router.api.request_body import ignored_header
from baton.router.api.sse import EventStyle, named_event_bytes

NAMES = CHAT_NAMES | {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "parameters": "input_schema",
}
INLINE_BLOCKS = 256  # converted on the loop: 6 us each, so under 2 ms
STYLE = EventStyle(named_event_bytes, anthropic_error, named_event_bytes({"type": "message_stop"}))


def messages_routes(service: GenerationService) -> APIRouter:
    """Returns the routes of ``/v1/messages`` and ``/v1/messages/count_tokens``."""
    routes = APIRouter()

    @routes.post(PATH, openapi_extra=body_docs(MessagesBody))
    async def messages(request: Request) -> Response:
        body = await parsed(MessagesBody, await read_body(request, service.limits.max_body_bytes))
        return await until_disconnect(request.receive, _respond(service, request, body))

    @routes.post(f"{PATH}/count_tokens", openapi_extra=body_docs(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        raw = await read_body(request, service.limits.max_body_bytes)
        return await _counted(service, await parsed(CountTokensBody, raw), len(raw))

    return routes


async def _respond(service: GenerationService, request: Request, body: MessagesBody) -> Response:
    return await respond(service, await messages_call(service, request.headers, body))


async def messages_call(service: GenerationService, headers: Headers, body: MessagesBody) -> PreparedCall:
    """Validates a call of ``/v1/messages`` and tokenizes its prompt.

    Raises InvalidRequest, ModelNotFound, and what ``GenerationService.prepare`` raises.
    """
    chat = await offload_if(body.blocks > INLINE_BLOCKS, body.chat)
    generation, text, form = await chat_generation(service, headers, chat, NAMES, must_bind=True)
    return PreparedCall(generation, text, MessagesShape(generation, form), chat, STYLE, ignored_header(body))


async def _counted(service: GenerationService, body: CountTokensBody, body_bytes: int) -> Response:
    """Returns the number of tokens of the prompt; charged and bounded as ``/tokenize`` is."""
    chat = await offload_if(body_bytes > INLINE_BYTES, body.chat)
    entry = await service.catalog.resolve(chat.model or "")
    text, size = service.catalog.text(entry), size_of(chat.messages)
    check_tokenized(size, entry.max_model_len, "messages")
    if chat.heavy_field:
        size = max(size, body_bytes)
        check_tokenized(size, entry.max_model_len, chat.heavy_field)
    await service.quotas.charge_tokenizer(entry, size // CHARS_PER_TOKEN)
    is_large = bool(chat.heavy_field) or size > INLINE_BYTES
    rendered = await offload_if(is_large, chat.render, text, chat.messages, NAMES["reasoning_effort"])
    ids = await text.encode(rendered, add_special_tokens=False)
    return json_response({"input_tokens": len(ids)}, headers=ignored_header(body))
