"""``/v1/rerank`` in Cohere's and Jina's form, ``/v1/score`` in vLLM's: how well documents answer a query.

Knows nothing of models. A pair is a request that generates one token: the log-probabilities of "yes" and "no", or a
cross-encoder's score, come back beside it, and the token is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import orjson
from fastapi import APIRouter, Request
from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from baton.protos.errors import BatonError, InvalidRequest
from baton.protos.json import Json
from baton.router.access.headers import clean_traceparent
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.service import GenerationService
from baton.router.answer.stream import open_answer
from baton.router.api.body import body_docs
from baton.router.api.disconnect import until_disconnect
from baton.router.api.large import parsed
from baton.router.api.limits import read_body
from baton.router.api.openai.prepared_call import TIMEOUT_HEADER, timeout_s
from baton.router.api.request_body import RequestBody, ignored_header
from baton.router.request.context import RequestContext
from baton.router.text.model import TextModel
from baton.router.text.reranking import INSTRUCTION, JudgePrompt, TokenLimits, judge_of
from baton.router.text.room import PromptRoom

Pairs = Sequence[tuple[str, str]]
Scores = tuple[list[float], int]  # one per pair, and the tokens of all prompts
MOST_TOKENS = (
    2 << 20
)  # of all prompts of a call: a query counts with every document, so a small body may ask for many


class PairsBody(RequestBody):
    """Declares the fields of both endpoints; ``instruction`` tells the model what makes a document relevant."""

    query_field: ClassVar[str] = "query"

    model: str | None = None
    instruction: str = Field(default=INSTRUCTION, min_length=1, max_length=4096)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, max_length=256)


class RerankBody(PairsBody):
    """Describes the body of POST /v1/rerank; documents are cut after ``max_tokens_per_doc`` tokens."""

    surface: ClassVar[str] = "rerank"

    query: str = Field(min_length=1)
    documents: list[str]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(default=None, ge=1)

    @field_validator("documents", mode="before")
    @classmethod
    def _texts(cls, found: object) -> object:
        """Takes ``{"text": …}`` for its text, as Cohere's and Jina's clients may send."""
        if not isinstance(found, list):
            return found
        return [each["text"] if isinstance(each, dict) and set(each) == {"text"} else each for each in found]


class ScoreBody(PairsBody):
    """Describes the body of POST /v1/score: ``text_1`` is one query for all documents of ``text_2``, or one for
    each.
    """

    surface: ClassVar[str] = "score"
    query_field: ClassVar[str] = "text_1"

    text_1: list[str]
    text_2: list[str]

    @field_validator("text_1", "text_2", mode="before")
    @classmethod
    def _many(cls, found: object) -> object:
        return [found] if isinstance(found, str) else found

    @model_validator(mode="after")
    def _go_together(self) -> ScoreBody:
        if len(self.text_1) not in (1, len(self.text_2)):
            text = f"text_1 has {len(self.text_1)} entries and text_2 {len(self.text_2)}: give one, or as many"
            raise InvalidRequest(text, "text_1")
        return self

    def pairs(self) -> Pairs:
        """Returns (query, document) for each document."""
        queries = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(queries, self.text_2, strict=True))


def rerank_routes(service: GenerationService) -> APIRouter:
    """Returns the routes of ``/v1/rerank`` and ``/v1/score``, and their aliases."""
    routes = APIRouter()

    async def rerank(request: Request) -> Response:
        body = await parsed(RerankBody, await read_body(request, service.limits.max_body_bytes))
        return await until_disconnect(request.receive, _rerank(service, request, body))

    async def score(request: Request) -> Response:
        body = await parsed(ScoreBody, await read_body(request, service.limits.max_body_bytes))
        return await until_disconnect(request.receive, _score(service, request, body))

    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        routes.post(path, openapi_extra=body_docs(RerankBody))(rerank)
    for path in ("/v1/score", "/score"):
        routes.post(path, openapi_extra=body_docs(ScoreBody))(score)
    return routes


async def _rerank(service: GenerationService, request: Request, body: RerankBody) -> Response:
    call = _Call(service, request, body)
    pairs = [(body.query, document) for document in body.documents]
    scores, tokens = await call.scores(pairs, "documents", body.max_tokens_per_doc)
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
    results: list[Json] = [{"index": at, "relevance_score": scores[at]} for at in best]
    if body.return_documents:
        results = [{**found, "document": {"text": body.documents[found["index"]]}} for found in results]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    told = {"id": call.name("rerank"), "model": call.model, "results": results, "usage": usage}
    return _answer(told, body)


async def _score(service: GenerationService, request: Request, body: ScoreBody) -> Response:
    call = _Call(service, request, body)
    scores, tokens = await call.scores(body.pairs(), "text_2")
    data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    told = {"id": call.name("score"), "object": "list", "created": int(service.environment.wall_clock())}
    return _answer(told | {"model": call.model, "data": data, "usage": usage}, body)


def _answer(told: Json, body: PairsBody) -> Response:
    return Response(orjson.dumps(told), headers=ignored_header(body), media_type="application/json")


class _Call:
    """One call under way; ``model`` and ``name`` are known once it has scores."""

    def __init__(self, service: GenerationService, request: Request, body: PairsBody) -> None:
        self._service, self._request, self._body = service, request, body
        self.model, self._id = "", ""

    def name(self, kind: str) -> str:
        """Returns the answer's id, which begins with ``kind``."""
        return f"{kind}-{self._id}"

    async def scores(self, pairs: Pairs, param: str, most: int | None = None) -> Scores:
        """Raises InvalidRequest naming ``param`` for too few or too many pairs."""
        service, body = self._service, self._body
        if not 1 <= len(pairs) <= service.limits.max_prompts:
            text = f"{param} has {len(pairs)} entries: give 1 to {service.limits.max_prompts}"
            raise InvalidRequest(text, param)
        entry = await service.catalog.resolve(body.model or "")
        text_model = service.catalog.text(entry)
        room = TokenLimits(entry.max_model_len - 1, most, body.query_field)
        judge = judge_of(text_model, entry.name) if entry.encoder is None else None
        if entry.encoder is not None and "instruction" in body.model_fields_set:
            raise InvalidRequest(f"{entry.name!r} is an encoder, which takes no instruction", "instruction")

        async def prompt(query: str, document: str) -> list[int]:
            if judge is not None:
                return await judge.prompt(text_model, (body.instruction, query), document, room)
            assert entry.encoder is not None
            return await entry.encoder.prompt(text_model, query, document, room)

        async def prompts() -> list[Sequence[int]]:
            for query in dict.fromkeys(query for query, _ in pairs):
                await text_model.require_room(query, PromptRoom(entry.max_model_len, body.query_field))
            await self._require_room(text_model, pairs[0][0], len(pairs), param)
            found, tokens = list[Sequence[int]](), 0
            for pair in pairs:
                found.append(await prompt(*pair))
                tokens += len(found[-1])
                if tokens > MOST_TOKENS:
                    raise _too_many(param, tokens)
            return found

        generation = await service.prepare(entry, self._ask(judge, param), prompts)
        self.model, self._id = entry.name, generation.request_id
        return await _scores(service, generation, text_model, judge), generation.prompt_tokens

    async def _require_room(self, text: TextModel, query: str, count: int, param: str) -> None:
        """Raises InvalidRequest if ``count`` prompts are over MOST_TOKENS already by the query that all have."""
        shared = count == 1 or not isinstance(self._body, ScoreBody) or len(self._body.text_1) == 1
        if shared and len(query.encode()) * count > MOST_TOKENS:
            tokens = count * len(await text.encode(query, add_special_tokens=False))
            if tokens > MOST_TOKENS:
                raise _too_many(param, tokens)

    def _ask(self, judge: JudgePrompt | None, param: str) -> GenerationOptions:
        timeout = timeout_s({TIMEOUT_HEADER: self._request.headers.get(TIMEOUT_HEADER, "")})
        wanted: Json = {"pooling": "score"}
        if judge is not None:
            wanted = {"ignore_eos": True, "logprobs": 0, "logprob_token_ids": (judge.yes, judge.no)}
        return GenerationOptions(
            sampling={"max_tokens": 1, "temperature": 0.0, **wanted},
            names={"prompt": param, "max_tokens": param},
            continues=judge is not None,
            prompt_only=judge is None,
            context=RequestContext(
                tenant_salt=(self._body.cache_salt or "").encode(),
                priority=self._body.priority or 0,
                deadline=self._service.deadline(timeout),
                traceparent=clean_traceparent(self._request.headers.get("traceparent")),
            ),
        )


def _too_many(param: str, tokens: int) -> InvalidRequest:
    told = f"the query with each of the documents takes {tokens} tokens and more, and a call at most {MOST_TOKENS}"
    return InvalidRequest(f"{told}: send fewer documents, or shorten the query", param)


async def _scores(
    service: GenerationService, generation: Generation, text: TextModel, judge: JudgePrompt | None
) -> list[float]:
    """One per prompt, in their order."""
    found: dict[int, float] = {}
    with open_answer(service, generation, text) as answer:
        async for piece in answer:
            for likelihood in piece.logprobs[: judge is not None]:
                assert judge is not None
                if len(likelihood.top) != 2:
                    raise BatonError("a worker of an older build can't score: upgrade it")
                found[piece.index] = judge.score(likelihood)
        if (encoder := generation.entry.encoder) is not None:
            return [encoder.score(summary.pooled) for summary in answer.summaries]
    return [found[at] for at in range(len(generation.prompts))]
