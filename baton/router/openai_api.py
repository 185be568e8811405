"""OpenAI's generation endpoints over REST: body -> generation -> JSON or server-sent events.

Knows nothing of workers, policies or how text becomes ids.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.protos.errors import InvalidRequest
from baton.router.answer import Answer, Piece, open_answer
from baton.router.disconnect import until_disconnect
from baton.router.generation import Ask, Frontend, Generation, clean_traceparent
from baton.router.limits import read_body
from baton.router.openai_errors import json_response
from baton.router.request import Summary
from baton.router.schemas import ChatBody, CompletionBody, GenerationBody, Prompt, body_docs, parse_body
from baton.router.shapes import ChatShape, CompletionShape, Json, Shape, collected
from baton.router.sse import EventStream
from baton.router.text import TextModel
from baton.router.validate import COMPLETION_TOKENS

ROUTE_HEADER = "x-baton-route"
TIMEOUT_HEADER = "x-request-timeout"


def openai_routes(frontend: Frontend) -> APIRouter:
    """``/v1/completions`` and ``/v1/chat/completions``."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=body_docs(CompletionBody))
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionBody, await read_body(request, frontend.limits.max_body_bytes))
        return await until_disconnect(request.receive, _completions(frontend, request, body))

    @routes.post("/v1/chat/completions", openapi_extra=body_docs(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatBody, await read_body(request, frontend.limits.max_body_bytes))
        return await until_disconnect(request.receive, _chat(frontend, request, body))

    return routes


async def _completions(frontend: Frontend, request: Request, body: CompletionBody) -> Response:
    if not 1 <= len(body.prompt) <= frontend.limits.max_prompts:
        raise InvalidRequest(
            f"prompt has {len(body.prompt)} entries: give 1 to {frontend.limits.max_prompts}", "prompt"
        )
    entry = frontend.catalog.find(body.model or "")
    text = frontend.catalog.text(entry)

    async def prompts() -> list[Sequence[int]]:
        return [await _prompt_ids(text, prompt, body.add_special_tokens) for prompt in body.prompt]

    ask = _ask(frontend, request, body, COMPLETION_TOKENS, continues=True, names={})
    generation = await frontend.prepare(entry, ask, prompts)
    echoes = [await _echo(text, prompt) for prompt in body.prompt] if body.echo else None
    shape = CompletionShape(
        generation,
        text.tokenizer,
        int(frontend.wall_clock()),
        body.include_usage,
        bool(body.return_token_ids),
        echoes,
    )
    return await _respond(frontend, generation, text, shape, body)


async def _chat(frontend: Frontend, request: Request, body: ChatBody) -> Response:
    entry = frontend.catalog.find(body.model or "")
    text = frontend.catalog.text(entry)

    async def prompts() -> list[Sequence[int]]:
        messages = [message.plain() for message in body.messages]
        return [await text.encode_chat(messages, body.add_generation_prompt, body.chat_template_kwargs)]

    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    ask = _ask(frontend, request, body, None, continues=False, names=names)
    generation = await frontend.prepare(entry, ask, prompts)
    created = int(frontend.wall_clock())
    shape = ChatShape(generation, text.tokenizer, created, body.include_usage, bool(body.return_token_ids))
    return await _respond(frontend, generation, text, shape, body)


async def _prompt_ids(text: TextModel, prompt: Prompt, add_special_tokens: bool = True) -> Sequence[int]:
    """Ids as they are, text tokenized."""
    return await text.encode_prompt(prompt, add_special_tokens) if isinstance(prompt, str) else prompt


async def _echo(text: TextModel, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await text.decode(prompt)


def _ask(
    frontend: Frontend,
    request: Request,
    body: GenerationBody,
    default_max_tokens: int | None,
    continues: bool,
    names: dict[str, str],
) -> Ask:
    return Ask(
        sampling=body.sampling(),
        n=1 if body.n is None else body.n,
        stops=tuple(body.stop),
        default_max_tokens=default_max_tokens,
        names=names,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        continues=continues,
        tenant_salt=(body.cache_salt or "").encode(),
        priority=body.priority or 0,
        deadline=frontend.deadline(_timeout_s(request)),
        traceparent=clean_traceparent(request.headers.get("traceparent")),
    )


def _timeout_s(request: Request) -> float | None:
    """Seconds that the client gives us, if it says so."""
    said = request.headers.get(TIMEOUT_HEADER)
    try:
        seconds = float(said) if said else None
    except ValueError:
        seconds = math.nan
    if seconds is not None and not seconds > 0:
        raise InvalidRequest(f"{TIMEOUT_HEADER} is {said!r}: give seconds over 0", TIMEOUT_HEADER)
    return seconds


async def _respond(
    frontend: Frontend, generation: Generation, text: TextModel, shape: Shape, body: GenerationBody
) -> Response:
    """The answer whole, or a stream whose first piece is already there: an error before it keeps its status."""
    with ExitStack() as scope:
        answer = scope.enter_context(open_answer(frontend, generation, text))
        if not body.stream:
            return await _whole(answer, shape)
        await answer.begun()
        scope.pop_all()  # from here on it is the stream's to close
    headers = {ROUTE_HEADER: route_header(answer.summaries[0])}
    return EventStream(_events(answer, shape, body.include_usage), lambda: answer.close("client_gone"), headers)


async def _whole(answer: Answer, shape: Shape) -> Response:
    parts: list[list[Piece]] = [[] for _ in answer.choices]
    async for piece in answer:
        parts[piece.index].append(piece)
    content = shape.whole(collected(parts), answer.usage())
    return json_response(content, headers={ROUTE_HEADER: route_header(answer.summaries[0])})


async def _events(answer: Answer, shape: Shape, include_usage: bool) -> AsyncIterator[Json]:
    for chunk in shape.opening():
        yield chunk
    async for piece in answer:
        for chunk in shape.chunks(piece):
            yield chunk
    if include_usage:
        yield shape.closing(answer.usage())


def route_header(summary: Summary) -> str:
    """The way that a request took and its seconds at each station so far, for a person to read."""
    ways = {
        "way": summary.way,
        "class": summary.context_class,
        "prefill": summary.prefill_worker,
        "decode": summary.decode_worker,
        "attempts": str(summary.attempts),
        "cached": str(summary.cached_tokens),
    }
    told = [f"{name}={value}" for name, value in ways.items() if value]
    return "; ".join(told + [f"{name}_s={seconds:.6f}" for name, seconds in summary.stations.items()])
