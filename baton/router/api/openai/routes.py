"""OpenAI's generation endpoints over REST.

Knows nothing of what a body means (``prepared_call``).
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.router.answer.service import GenerationService
from baton.router.api.disconnect import until_disconnect
from baton.router.api.large import parsed
from baton.router.api.limits import read_body
from baton.router.api.openai.prepared_call import chat_call, completion_call, respond
from baton.router.api.openai.schemas import ChatBody, CompletionBody, body_docs


def openai_routes(service: GenerationService) -> APIRouter:
    """Returns the routes of ``/v1/completions`` and ``/v1/chat/completions``."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=body_docs(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await parsed(CompletionBody, await read_body(request, service.limits.max_body_bytes))
        return await until_disconnect(request.receive, _completions(service, request, body))

    @routes.post("/v1/chat/completions", openapi_extra=body_docs(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await parsed(ChatBody, await read_body(request, service.limits.max_body_bytes))
        return await until_disconnect(request.receive, _chat(service, request, body))

    return routes


async def _completions(service: GenerationService, request: Request, body: CompletionBody) -> Response:
    return await respond(service, await completion_call(service, request.headers, body))


async def _chat(service: GenerationService, request: Request, body: ChatBody) -> Response:
    return await respond(service, await chat_call(service, request.headers, body))
