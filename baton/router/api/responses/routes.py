"""OpenAI's Responses API over REST, stateless.

Knows nothing of how a response is worded (``responses.shape``) or generated (``openai.prepared_call``).
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.protos.json import Json
from baton.router.answer.service import GenerationService
from baton.router.api.disconnect import until_disconnect
from baton.router.api.errors import error_json
from baton.router.api.large import offload_if, parsed
from baton.router.api.limits import read_body
from baton.router.api.openai.prepared_call import CHAT_NAMES, Headers, PreparedCall, chat_generation, respond
from baton.router.api.openai.schemas import body_docs
from baton.router.api.request_body import ignored_header
from baton.router.api.responses.schemas import ResponsesBody
from baton.router.api.responses.shape import ResponsesShape
from baton.router.api.sse import EventStyle, large_named_event_bytes, named_event_bytes

NAMES = CHAT_NAMES | {
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "parameters": "parameters",
}
INLINE_ITEMS = 256  # of the input, converted on the loop: 6 us each, so under 2 ms


def responses_routes(service: GenerationService) -> APIRouter:
    """Returns the route of ``/v1/responses``."""
    routes = APIRouter()

    @routes.post("/v1/responses", openapi_extra=body_docs(ResponsesBody))
    async def responses(request: Request) -> Response:
        body = await parsed(ResponsesBody, await read_body(request, service.limits.max_body_bytes))
        return await until_disconnect(request.receive, _respond(service, request, body))

    return routes


async def _respond(service: GenerationService, request: Request, body: ResponsesBody) -> Response:
    return await respond(service, await responses_call(service, request.headers, body))


async def responses_call(service: GenerationService, headers: Headers, body: ResponsesBody) -> PreparedCall:
    """Validates a call of ``/v1/responses`` and tokenizes its prompt.

    Raises InvalidRequest, ModelNotFound, and what ``GenerationService.prepare`` raises.
    """
    items = len(body.input) if isinstance(body.input, list) else 1
    chat = await offload_if(items > INLINE_ITEMS, body.chat)
    generation, text, form = await chat_generation(service, headers, chat, NAMES)
    shape = ResponsesShape(generation, text.tokenizer, int(service.environment.wall_clock()), body, form)
    is_scored = generation.samplings[0].logprobs is not None  # then all but deltas list all tokens so far
    style = EventStyle(
        named_event_bytes,
        lambda error: _error(error, shape),
        b"",
        lambda event: is_scored and not event["type"].endswith(".delta"),
        large_named_event_bytes,
    )
    return PreparedCall(generation, text, shape, chat, style, ignored_header(body, form.binds_calls))


def _error(error: BaseException, shape: ResponsesShape) -> Json:
    """An error in the middle of the stream of ``shape``'s events."""
    told = error_json(error)["error"]
    return shape.event("error", code=told["code"], message=told["message"], param=told["param"])
