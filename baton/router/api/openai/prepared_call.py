"""One call of OpenAI's generation endpoints, from its body to the response: what to generate and how to word the
answer.

Knows nothing of routes or workers. ``headers`` are the HTTP request's; a batch line has none.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress

import msgspec
from starlette.responses import Response

from baton.protos.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from baton.protos.json import Json
from baton.router.access.headers import clean_traceparent
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.service import GenerationService
from baton.router.answer.stream import AnswerStream, TextDelta, open_answer
from baton.router.answer.validate import COMPLETION_TOKENS
from baton.router.api.large import INLINE_BYTES, large_response, offload_if
from baton.router.api.openai.answer_format import answer_format, strict_calls
from baton.router.api.openai.best_of import BestOf
from baton.router.api.openai.marked_tokens import marked_tokens
from baton.router.api.openai.messages import size_of
from baton.router.api.openai.schemas import ChatBody, CompletionBody, GenerationBody
from baton.router.api.openai.shapes import ChatShape, CompletionShape, Shape, collected, usage_json
from baton.router.api.openai.tool_faults import PARAMETERS, refuse_parameters
from baton.router.api.openai.truncation import all_ids
from baton.router.api.request_body import ignored_header
from baton.router.api.sse import OPENAI_EVENTS, EventStream, EventStyle
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary
from baton.router.text.catalog import ModelEntry
from baton.router.text.chat_reader import AnswerFormat
from baton.router.text.model import TextModel
from baton.router.text.room import PromptRoom

ROUTE_HEADER = "x-baton-route"
TIMEOUT_HEADER = "x-request-timeout"
Headers = Mapping[str, str]
NO_HEADERS: Headers = {}
INLINE_CHARS = 16 << 10  # of an answer, tokenized on the loop: some 5 ms
CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}


class PreparedCall(msgspec.Struct, frozen=True):
    """Holds a validated call that is ready to be opened; ``shape`` words the answer, ``told`` are extra response
    headers.
    """

    generation: Generation
    text: TextModel
    shape: Shape
    body: GenerationBody
    style: EventStyle = OPENAI_EVENTS
    told: Mapping[str, str] = {}


async def completion_call(service: GenerationService, headers: Headers, body: CompletionBody) -> PreparedCall:
    """Validates a call of ``/v1/completions`` and tokenizes its prompts.

    Raises InvalidRequest, ModelNotFound, and what ``GenerationService.prepare`` raises.
    """
    if not 1 <= len(body.prompt) <= service.limits.max_prompts:
        raise InvalidRequest(
            f"prompt has {len(body.prompt)} entries: give 1 to {service.limits.max_prompts}", "prompt"
        )
    deadline = service.deadline(timeout_s(headers))
    entry = await service.catalog.resolve(body.model or "")
    text = service.catalog.text(entry)

    cut, room = body.cut(entry.max_model_len, body.answer_tokens), PromptRoom(entry.max_model_len)

    async def prompts() -> list[Sequence[int]]:
        return [ids async for ids in all_ids(text, body.prompt, body.add_special_tokens, cut, room)]

    options = _ask(service, headers, body, COMPLETION_TOKENS, True, {}, deadline)
    generation = await service.prepare(entry, options, prompts)
    echoes = None
    if body.echo:
        used = body.prompt if cut is None else generation.prompts
        echoes = [prompt if isinstance(prompt, str) else await text.decode(prompt) for prompt in used]
    shape = CompletionShape(
        generation,
        text.tokenizer,
        int(service.environment.wall_clock()),
        body.include_usage,
        bool(body.return_token_ids),
        echoes,
        wants_prompt=body.prompt_logprobs is not None,
    )
    if body.is_best_of:
        shown = BestOf(shape, generation.options.n, body.returned_choices, body.logprobs is not None)
        return PreparedCall(generation, text, shown, body, told=ignored_header(body))
    return PreparedCall(generation, text, shape, body, told=ignored_header(body))


async def chat_call(service: GenerationService, headers: Headers, body: ChatBody) -> PreparedCall:
    """Validates a call of ``/v1/chat/completions`` and tokenizes its prompt.

    Raises InvalidRequest, ModelNotFound, and what ``GenerationService.prepare`` raises.
    """
    names = dict(CHAT_NAMES)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    generation, text, form = await chat_generation(service, headers, body, names)
    created, with_ids = int(service.environment.wall_clock()), bool(body.return_token_ids)
    shape = ChatShape(generation, text.tokenizer, created, body.include_usage, with_ids, form)
    return PreparedCall(generation, text, shape, body, told=ignored_header(body, form.binds_calls))


async def chat_generation(
    service: GenerationService,
    headers: Headers,
    body: ChatBody,
    names: dict[str, str],
    must_bind: bool = False,
    entry: ModelEntry | None = None,
) -> tuple[Generation, TextModel, AnswerFormat]:
    """Validates a chat body; returns the Generation, the text functions for its answers, and how those are parsed.

    ``names`` maps our field names to the client's, for errors. ``must_bind`` refuses strict tools whose calls no
    grammar can bind. ``entry`` is what the body's ``model`` names, looked up if it isn't given. Raises as
    ``chat_call`` does.
    """
    deadline = service.deadline(timeout_s(headers))
    entry = await service.catalog.resolve(body.model or "") if entry is None else entry
    text = service.catalog.text(entry)
    effort = names.get("reasoning_effort", "reasoning_effort")
    is_large = bool(body.heavy_field) or size_of(body.messages) > INLINE_BYTES
    async with service.within(deadline):
        rendered = await offload_if(is_large, body.render, text, body.messages, effort)
    cut = body.cut(entry.max_model_len, body.answer_tokens)
    room = PromptRoom(entry.max_model_len, names.get("prompt", "prompt")) if cut is None else None

    async def prompts() -> list[Sequence[int]]:
        needed = rendered if cut is None else await cut.needed(text, rendered)
        ids = await text.encode(needed, bool(body.add_special_tokens), room)
        return [ids if cut is None else cut.of(ids)]

    form = answer_format(service, text, body, rendered)
    options = _ask(service, headers, body, None, bool(body.continue_final_message), names, deadline)
    lazy = strict_calls(service, text, body, rendered, names.get("parameters", PARAMETERS))
    if lazy is not None:
        names, form = options.names | {"grammar": "tools"}, msgspec.structs.replace(form, binds_calls=True)
        options = msgspec.structs.replace(options, sampling=options.sampling | {"grammar": lazy}, names=names)
    elif must_bind:
        body.refuse_unheld()
    try:
        generation = await service.prepare(entry, options, prompts)
        if any(message.marks for message in body.messages) and cut is None:
            async with service.within(deadline):
                marked = await marked_tokens(text, body, rendered, generation.prompts[0], is_large)
            whole = body.retains_all or marked.all == generation.prompt_tokens
            context = generation.context.with_marks(marked, whole)
            generation = msgspec.structs.replace(generation, context=context)
        return generation, text.keeping(form.marks), form
    except InvalidRequest as error:
        if error.param != "tools":
            raise
        # What is refused already stays refused.
        with suppress(Overloaded, Unavailable, DeadlineExceeded):
            async with service.within(deadline):
                await refuse_parameters(
                    service, body, options.context.tenant_salt, names.get("parameters", PARAMETERS)
                )
        raise


def _choices(service: GenerationService, body: GenerationBody) -> int:
    """Answers to write for each prompt."""
    n, most = 1 if body.n is None else body.n, service.limits.max_n
    if not isinstance(body, CompletionBody) or body.best_of is None:
        return n
    if body.best_of > most:
        raise InvalidRequest(f"best_of is {body.best_of}: it must be from n to {most}", "best_of")
    return body.best_of


def _ask(
    service: GenerationService,
    headers: Headers,
    body: GenerationBody,
    default_max_tokens: int | None,
    continues: bool,
    names: dict[str, str],
    deadline: float,
) -> GenerationOptions:
    return GenerationOptions(
        sampling=body.sampling(),
        n=_choices(service, body),
        stops=tuple(body.stop),
        default_max_tokens=default_max_tokens,
        names=names | {name: names.get(theirs, theirs) for name, theirs in body.names().items()},
        bad_words=tuple(body.bad_words or ()),
        prompt_only=isinstance(body, CompletionBody) and body.prompt_only,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        continues=continues,
        context=RequestContext(
            tenant_salt=(body.cache_salt or "").encode(),
            priority=body.priority or 0,
            deadline=deadline,
            traceparent=clean_traceparent(headers.get("traceparent")),
            session=body.session,
            retained=body.retained,
        ),
        prediction="" if body.prediction is None else body.prediction.text,
    )


def timeout_s(headers: Headers) -> float | None:
    """Returns the timeout in seconds that header TIMEOUT_HEADER gives, or None.

    Raises InvalidRequest unless it is over 0.
    """
    said = headers.get(TIMEOUT_HEADER)
    try:
        seconds = float(said) if said else None
    except ValueError:
        seconds = math.nan
    if seconds is not None and not seconds > 0:
        raise InvalidRequest(f"{TIMEOUT_HEADER} is {said!r}: give seconds over 0", TIMEOUT_HEADER)
    return seconds


async def respond(service: GenerationService, call: PreparedCall) -> Response:
    """Returns the HTTP response of a call: the whole answer as JSON, or an event stream.

    A stream is returned once its first piece is there, so that an earlier error keeps its HTTP status.
    """
    if not call.body.stream:
        content, summary = await full_answer(service, call)
        return await large_response(content, answer_headers(call, summary), is_scored(call))
    with ExitStack() as scope:
        answer = scope.enter_context(open_answer(service, call.generation, call.text))
        await answer.begun()
        scope.pop_all()  # from here on it is the stream's to close
    headers = answer_headers(call, answer.summaries[0])
    events = _events(answer, call.shape, call.body)
    return EventStream(events, lambda: answer.close("client_gone"), headers, call.style)


async def full_answer(service: GenerationService, call: PreparedCall) -> tuple[Json, ChoiceSummary]:
    """Returns the unstreamed answer as a JSON object, and the summary of its first choice."""
    with open_answer(service, call.generation, call.text) as answer:
        parts: list[list[TextDelta]] = [[] for _ in range(answer.count)]
        async for piece in answer:
            parts[piece.index].append(piece)
        is_slow = is_scored(call) or _is_slow(call.shape, sum(len(piece.text) for each in parts for piece in each))
        shown = await offload_if(is_slow, lambda: call.shape.whole(collected(parts), answer.usage()))
        return shown, answer.summaries[0]


def is_scored(call: PreparedCall) -> bool:
    """Returns whether the answer lists single tokens (logprobs or token ids), which makes it large to encode."""
    sampling = call.generation.samplings[0]
    asked = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    return asked or bool(call.body.return_token_ids)


async def _events(answer: AnswerStream, shape: Shape, body: GenerationBody) -> AsyncIterator[Json]:
    told = written = 0  # tokens and characters that the client was sent: choices may be ahead of their chunks
    continuous = body.continuous_usage

    def with_usage(chunk: Json) -> Json:
        usage = msgspec.structs.replace(answer.usage(), completion_tokens=told)
        return chunk | {"usage": usage_json(usage)}

    for chunk in shape.opening():
        yield with_usage(chunk) if continuous else chunk
    async for piece in answer:
        told += len(piece.token_ids)
        written += len(piece.text)
        for chunk in shape.chunks(piece):
            yield with_usage(chunk) if continuous else chunk
    if body.include_usage or shape.always_closes:
        yield await offload_if(_is_slow(shape, written), shape.closing, answer.usage())


def _is_slow(shape: Shape, chars: int) -> bool:
    """Returns whether the end of an answer of so many characters takes longer to make than the loop may wait."""
    return shape.recounts and chars > INLINE_CHARS


def answer_headers(call: PreparedCall, summary: ChoiceSummary) -> dict[str, str]:
    """Returns the headers of an answer whose first choice has ``summary``: its way, and what was ignored."""
    return {ROUTE_HEADER: route_header(summary), **call.told}


def route_header(summary: ChoiceSummary) -> str:
    """Returns the value of header ``x-baton-route``: a request's way, workers, attempts, cached tokens and its
    seconds at each station so far.
    """
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
