"""Pinned prefixes: ``/v1/cache/prefixes`` computes, pins, lists and deletes prompts' beginnings in workers' KV
caches.

Knows nothing of pages or workers. A tenant sees and deletes its own; admin keys all of them. A pin changes no
answer, only which blocks are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from baton.cluster.prefix_pins import PinnedPrefix
from baton.protos.errors import Forbidden, InvalidRequest
from baton.protos.json import Json
from baton.router.access.caller import CALLER
from baton.router.access.headers import clean_traceparent
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.service import GenerationService
from baton.router.answer.stream import open_answer
from baton.router.api.body import body_docs
from baton.router.api.disconnect import until_disconnect
from baton.router.api.errors import json_response
from baton.router.api.large import INLINE_BYTES, offload_if, parsed
from baton.router.api.limits import read_body
from baton.router.api.openai.conversation import ConversationBody
from baton.router.api.openai.messages import ConversationMessage, size_of
from baton.router.api.surfaces import PrefixSurface
from baton.router.dispatch.prefix_control import PrefixWish
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary
from baton.router.text.catalog import ModelEntry
from baton.router.text.model import TextModel
from baton.router.text.room import PromptRoom

MOST_WORKERS = 256  # workers that may be asked for at once, so that a typo is refused


class PrefixBody(ConversationBody):
    """Describes a prefix to pin: ``prompt`` as text or token ids, or ``messages`` with their tools.

    It is kept on ``workers`` workers for ``ttl_s`` seconds. Messages are rendered without the generation prompt
    unless ``add_generation_prompt`` is true, because more turns may follow.
    """

    surface: ClassVar[str] = "cache"
    id_lists: ClassVar[tuple[str, ...]] = ("prompt",)

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[ConversationMessage] | None = None
    workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    ttl_s: float = Field(default=3600.0, gt=0, le=7 * 86_400)
    cache_salt: str | None = Field(default=None, max_length=256)

    @model_validator(mode="after")
    def _one_of_two(self) -> PrefixBody:
        if (not self.prompt) == (not self.messages):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self

    async def ids(self, text: TextModel, room: PromptRoom) -> Sequence[int]:
        """Returns the prefix's token ids. Raises ContextTooLong for a long text that can't fit ``room``."""
        if isinstance(self.prompt, list):
            return self.prompt
        if self.prompt is not None:
            return await text.encode(self.prompt, self.add_special_tokens is not False, room)
        messages = self.messages or []
        opened = self.model_copy(update={"add_generation_prompt": bool(self.add_generation_prompt)})
        is_large = bool(opened.heavy_field) or size_of(messages) > INLINE_BYTES
        rendered = await offload_if(is_large, opened.render, text, messages)
        return await text.encode(rendered, bool(self.add_special_tokens), room)


def prefix_routes(surface: PrefixSurface | None, service: GenerationService) -> APIRouter:
    """Returns the routes that pin, list and delete prefixes."""
    routes = APIRouter()

    @routes.post("/v1/cache/prefixes", openapi_extra=body_docs(PrefixBody))
    async def pin(request: Request) -> Response:
        """Answered when the prefix was read and its full blocks are pinned."""
        given = _there(surface)
        body = await parsed(PrefixBody, await read_body(request, service.limits.max_body_bytes))
        return await until_disconnect(request.receive, _pin(given, service, request, body))

    @routes.get("/v1/cache/prefixes")
    async def prefixes() -> Response:
        """The caller's pinned prefixes; to operators everybody's."""
        found = await _there(surface).control.listed(*_who())
        return json_response({"object": "list", "data": [_shown(pin) for pin in found]})

    @routes.delete("/v1/cache/prefixes/{pin}")
    async def delete(pin: str) -> Response:
        """The prefix's blocks may be evicted again."""
        found = await _there(surface).control.remove(pin, *_who())
        return json_response({"id": found.id, "object": "cache.prefix", "deleted": True})

    return routes


async def _pin(surface: PrefixSurface, service: GenerationService, request: Request, body: PrefixBody) -> Response:
    entry = await service.catalog.resolve(body.model or "")
    text = service.catalog.text(entry)
    ids = tuple(await body.ids(text, PromptRoom(entry.max_model_len)))
    tenant, admin = _who()
    async with surface.control.room(tenant, admin, len(ids) * body.workers):
        return await _read_and_pin(surface, service, request, body, (entry, text, ids))


async def _read_and_pin(
    surface: PrefixSurface,
    service: GenerationService,
    request: Request,
    body: PrefixBody,
    prefix: tuple[ModelEntry, TextModel, tuple[int, ...]],
) -> Response:
    entry, text, ids = prefix
    options = GenerationOptions(
        sampling={"max_tokens": 1, "temperature": 0.0},
        prompt_only=True,
        context=RequestContext(
            tenant_salt=(body.cache_salt or "").encode(),
            deadline=service.deadline(),
            traceparent=clean_traceparent(request.headers.get("traceparent")),
        ),
    )

    async def prompts() -> list[Sequence[int]]:
        return [ids]

    generation = await service.prepare(entry, options, prompts)
    summary = await _read(service, generation, text)
    wish = PrefixWish(entry.model_id, ids, generation.context, body.workers, body.ttl_s)
    return json_response(_shown(await surface.control.add(wish, summary)))


async def _read(service: GenerationService, generation: Generation, text: TextModel) -> ChoiceSummary:
    """Has the prefix computed, as a request of one token that nobody sees."""
    with open_answer(service, generation, text) as answer:
        async for _ in answer:
            pass
        return answer.summaries[0]


def _there(surface: PrefixSurface | None) -> PrefixSurface:
    if surface is None:
        raise Forbidden("this router is not part of a cluster whose caches can be asked")
    return surface


def _who() -> tuple[str, bool]:
    """The caller's tenant, and whether it may see everybody's."""
    caller = CALLER.get()
    return caller.tenant, caller.sees_all


def _shown(pin: PinnedPrefix) -> Json:
    return {
        "id": pin.id,
        "object": "cache.prefix",
        "model": pin.model,
        "tokens": pin.tokens,
        "tenant": pin.tenant,
        "created": int(pin.created),
        "expires_at": int(pin.until),
        "workers": [{"worker": worker, "tokens": tokens} for worker, tokens in sorted(pin.workers.items())],
        "lost_workers": sorted(pin.lost),
    }
