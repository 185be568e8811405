"""REST endpoints that don't generate: models, tokenizer, health, metrics, version.

Knows nothing of sampling or streams.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePosixPath

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.protos.errors import NoWorker
from baton.protos.version import product_version
from baton.router.answer.service import CHARS_PER_TOKEN, LEAST_DETOKENIZED, GenerationService
from baton.router.answer.validate import check_count, check_ids, check_tokenized
from baton.router.api.errors import json_response
from baton.router.api.large import INLINE_BYTES, SLICE_ITEMS, large_response, offload_if, parsed
from baton.router.api.limits import read_body
from baton.router.api.openai.messages import size_of
from baton.router.api.openai.schemas import DetokenizeBody, TokenizeBody, body_docs
from baton.router.api.request_body import ignored_header
from baton.router.api.surfaces import Exposition
from baton.router.request.request import ServingBackend
from baton.router.text.catalog import ModelCatalog, ModelEntry


def ops_routes(serving: ServingBackend, catalog: ModelCatalog, exposition: Exposition) -> APIRouter:
    """Returns the routes of ``/health``, ``/ready``, ``/metrics`` and ``/version``."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @routes.get("/ready")
    async def ready() -> Response:
        if not serving.ready():
            raise NoWorker("not ready: a request could not be placed now", retry_after_s=1.0)
        return json_response(
            {"status": "ready", "models": [e.model_id for e in catalog.entries() if e.adapter is None]}
        )

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus' text; OpenMetrics, with exemplars, for those who accept it."""
        shown, media_type = await exposition(request.headers.get("accept", ""))
        return Response(shown, headers={"content-type": media_type})

    @routes.get("/version")
    async def baton_version() -> Response:
        return json_response({"version": product_version()})

    return routes


def model_routes(service: GenerationService) -> APIRouter:
    """Returns the routes of ``/v1/models``, ``/tokenize`` and ``/detokenize``."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        return json_response(_models([_model(entry) for entry in service.catalog.entries()]))

    @routes.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        return json_response(_model(await service.catalog.described(model_id)))

    @routes.post("/tokenize", openapi_extra=body_docs(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        raw = await read_body(request, service.limits.max_body_bytes)
        return await _tokenize(service, await parsed(TokenizeBody, raw), len(raw))

    @routes.post("/detokenize", openapi_extra=body_docs(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await parsed(DetokenizeBody, await read_body(request, service.limits.max_body_bytes))
        entry = await service.catalog.resolve(body.model or "")
        check_count("tokens", len(body.tokens), max(LEAST_DETOKENIZED, entry.max_model_len))
        check_ids(body.tokens, entry.vocab_size, "tokens")
        await service.quotas.charge_tokenizer(entry, len(body.tokens))
        text = await service.catalog.text(entry).decode(body.tokens, body.skip_special_tokens)
        return json_response({"prompt": text}, headers=ignored_header(body))

    return routes


def _model(entry: ModelEntry) -> dict[str, object]:
    """OpenAI's and Anthropic's model object in one, with context length, root and parent as vLLM words them.

    ``root`` of an adapter is its path; of an absolute one the last part, because the rest is the server's own.
    """
    adapter, path = entry.adapter, PurePosixPath(entry.adapter.path if entry.adapter else "")
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "baton",
        "root": entry.name if adapter is None else path.name if path.is_absolute() else str(path),
        "parent": None if adapter is None else entry.model_id,
        "max_model_len": entry.max_model_len,
        "type": "model",
        "display_name": entry.name,
        "created_at": datetime.fromtimestamp(entry.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": entry.max_model_len,
    }


def _models(found: list[dict[str, object]]) -> dict[str, object]:
    """Returns the list of all models, which is one page of Anthropic's."""
    ends = [found[at]["id"] if found else None for at in (0, -1)]
    return {"object": "list", "data": found, "first_id": ends[0], "last_id": ends[1], "has_more": False}


async def _tokenize(service: GenerationService, body: TokenizeBody, body_bytes: int) -> Response:
    entry = await service.catalog.resolve(body.model or "")
    text = service.catalog.text(entry)
    size = size_of(body.messages) if body.messages else len(body.prompt or "")
    check_tokenized(size, entry.max_model_len, "prompt")
    if body.heavy_field:
        size = max(size, body_bytes)
        check_tokenized(size, entry.max_model_len, body.heavy_field)
    await service.quotas.charge_tokenizer(entry, size // CHARS_PER_TOKEN)
    if body.messages:
        rendered = await offload_if(size > INLINE_BYTES, body.render, text, body.messages)
        ids = await text.encode(rendered, add_special_tokens=bool(body.add_special_tokens))
    else:
        ids = await text.encode(body.prompt or "", body.add_special_tokens is not False)
    found = {"count": len(ids), "max_model_len": entry.max_model_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = await offload_if(len(ids) > SLICE_ITEMS, text.token_names, ids)
    return await large_response(found, ignored_header(body), len(ids) > SLICE_ITEMS)
