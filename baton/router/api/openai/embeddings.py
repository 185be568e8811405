"""OpenAI's ``/v1/embeddings``: a text's pooled hidden state as one vector of length 1.

Knows nothing of models. An embedding is a request that generates one token: the prompt's pooled state comes back
beside it, and the token is dropped.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.router.access.headers import clean_traceparent
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.service import GenerationService
from baton.router.answer.stream import open_answer
from baton.router.api.body import body_docs
from baton.router.api.disconnect import until_disconnect
from baton.router.api.large import offload_if, parsed
from baton.router.api.limits import read_body
from baton.router.api.openai.prepared_call import ROUTE_HEADER, Headers, route_header, timeout_s
from baton.router.api.openai.schemas import Prompts
from baton.router.api.openai.truncation import TruncatedBody, all_ids
from baton.router.api.request_body import ignored_header
from baton.router.request.context import RequestContext
from baton.router.text.embedding_style import EmbeddingStyle
from baton.router.text.model import TextModel
from baton.router.text.room import PromptRoom

Vector = NDArray[np.float32]
INLINE_FLOATS = 16_384  # written on the loop


class EmbeddingsBody(TruncatedBody):
    """Describes the body of POST /v1/embeddings.

    ``pooling``: the mean of all tokens' hidden states, the last one's or an encoder's first one's; by default what
    the model's files say, else the mean. ``prompt_name``: which of the model's named prompts is put before each
    text.
    """

    surface: ClassVar[str] = "embeddings"

    model: str | None = None
    id_lists: ClassVar[tuple[str, ...]] = ("input",)

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Literal["mean", "last", "cls"] | None = None
    prompt_name: str | None = Field(default=None, max_length=256)
    add_special_tokens: bool = True
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, max_length=256)


def embeddings_routes(service: GenerationService) -> APIRouter:
    """Returns the route of ``/v1/embeddings``."""
    routes = APIRouter()

    @routes.post("/v1/embeddings", openapi_extra=body_docs(EmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        body = await parsed(EmbeddingsBody, await read_body(request, service.limits.max_body_bytes))
        content, told = await until_disconnect(request.receive, embedded(service, request.headers, body))
        return Response(content, headers=told, media_type="application/json")

    return routes


async def embedded(
    service: GenerationService, headers: Headers, body: EmbeddingsBody
) -> tuple[bytes, dict[str, str]]:
    """Returns the answer to a call of ``/v1/embeddings`` as JSON, and the headers that go with it.

    ``headers`` are the HTTP request's; a batch line has none. Raises InvalidRequest, ModelNotFound, and what
    ``GenerationService.prepare`` and the answers raise.
    """
    most = service.limits.max_prompts
    if not 1 <= len(body.input) <= most:
        raise InvalidRequest(f"input has {len(body.input)} entries: give 1 to {most}", "input")
    entry = await service.catalog.resolve(body.model or "")
    text = service.catalog.text(entry)

    cut, inputs = body.cut(entry.max_model_len), _worded(body, entry.embedding)
    room = PromptRoom(entry.max_model_len, "input")

    async def prompts() -> list[Sequence[int]]:
        return [ids async for ids in all_ids(text, inputs, body.add_special_tokens, cut, room)]

    asked = _ask(service, headers, body, entry.embedding.pools(body.pooling))
    generation = await service.prepare(entry, asked, prompts)
    vectors, route = await _vectors(service, generation, text)
    usage = {"prompt_tokens": generation.prompt_tokens, "total_tokens": generation.prompt_tokens}
    is_large = sum(map(len, vectors)) > INLINE_FLOATS
    written = await offload_if(is_large, _written, vectors, body)
    told = {"object": "list", "model": entry.name, "usage": usage}
    content = orjson.dumps(told)[:-1] + b',"data":[' + written + b"]}"
    return content, {ROUTE_HEADER: route, **ignored_header(body)}


def _worded(body: EmbeddingsBody, style: EmbeddingStyle) -> Sequence[str | Sequence[int]]:
    """Returns each input behind the named prompt; ids are taken as they are, and an empty text stays empty."""
    before = style.prompt(body.prompt_name)
    if body.prompt_name and not all(isinstance(each, str) for each in body.input):
        raise InvalidRequest("prompt_name goes before texts: give input as text", "prompt_name")
    return [before + each if isinstance(each, str) and each else each for each in body.input]


def _ask(service: GenerationService, headers: Headers, body: EmbeddingsBody, pooling: str) -> GenerationOptions:
    return GenerationOptions(
        sampling={"max_tokens": 1, "temperature": 0.0, "pooling": pooling},
        names={"prompt": "input", "max_tokens": "input"},
        prompt_only=True,
        context=RequestContext(
            tenant_salt=(body.cache_salt or "").encode(),
            priority=body.priority or 0,
            deadline=service.deadline(timeout_s(headers)),
            traceparent=clean_traceparent(headers.get("traceparent")),
        ),
    )


async def _vectors(service: GenerationService, generation: Generation, text: TextModel) -> tuple[list[Vector], str]:
    """One per prompt, as the workers gave them; and the first one's way."""
    with open_answer(service, generation, text) as answer:
        async for _ in answer:
            pass
        summaries = answer.summaries
        return [np.frombuffer(s.pooled, "<f4") for s in summaries], route_header(summaries[0])


def _cut(vector: Vector, dimensions: int | None) -> Vector:
    """The first ``dimensions`` of it, at length 1."""
    if dimensions is not None and dimensions > len(vector):
        text = f"dimensions is {dimensions}: this model's vectors have {len(vector)}"
        raise InvalidRequest(text, "dimensions")
    cut = vector[:dimensions].astype(np.float64)
    return (cut / max(float(np.linalg.norm(cut)), 1e-12)).astype("<f4")


def _written(vectors: list[Vector], body: EmbeddingsBody) -> bytes:
    """Writes vectors as JSON, one after the other: a thousand of them at once would hold up everybody."""
    form = body.encoding_format
    return b",".join(
        orjson.dumps(_embedding(at, _cut(vector, body.dimensions), form)) for at, vector in enumerate(vectors)
    )


def _embedding(index: int, vector: Vector, form: str) -> Json:
    value: object = base64.b64encode(vector.tobytes()).decode() if form == "base64" else vector.tolist()
    return {"object": "embedding", "index": index, "embedding": value}
