"""Lines of a batch's input file, one JSON request each: parsing them, and answering one.

Knows nothing of stores or lanes. https://platform.openai.com/docs/api-reference/batch/request-input
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Collection

import msgspec
import orjson

from baton.protos.errors import BatonError, InvalidRequest, QuotaExceeded
from baton.protos.json import Json
from baton.router.answer.service import GenerationService
from baton.router.api.errors import error_json
from baton.router.api.large import offload_if, parsed, require_light
from baton.router.api.openai.embeddings import EmbeddingsBody, embedded
from baton.router.api.openai.prepared_call import NO_HEADERS, PreparedCall, chat_call, completion_call, full_answer
from baton.router.api.openai.schemas import ChatBody, CompletionBody
from baton.router.api.responses.routes import responses_call
from baton.router.api.responses.schemas import ResponsesBody

MAX_LINES = 50_000  # requests of one file, as OpenAI has it
INLINE_LINES = 1000  # sorted by model on the loop, which takes a millisecond
MAX_TOLD = 20  # errors of a bad file that are told
MOST_SAID = 500  # characters of an error, which may quote what a line holds
GeneratedBody = ChatBody | CompletionBody | ResponsesBody
GENERATED: dict[str, tuple[type[GeneratedBody], Callable[..., Awaitable[PreparedCall]]]] = {
    "/v1/chat/completions": (ChatBody, chat_call),
    "/v1/completions": (CompletionBody, completion_call),
    "/v1/responses": (ResponsesBody, responses_call),
}
EMBEDDED = "/v1/embeddings"


class BatchLine(msgspec.Struct, frozen=True):
    """Describes one request of a batch, as OpenAI's input file has it."""

    custom_id: str
    method: str
    url: str
    body: Json


def read_lines(content: bytes, endpoint: str) -> tuple[list[BatchLine], list[Json]]:
    """Parses a batch's input file; returns its requests and its errors (MAX_TOLD at most, as JSON objects).

    Run none of the requests if there are errors.
    """
    lines: list[BatchLine] = []
    errors: list[Json] = []
    seen: set[str] = set()
    for number, raw in enumerate(filter(None, (part.strip() for part in content.splitlines())), 1):
        try:
            lines.append(_line(raw, endpoint, seen, number))
        except InvalidRequest as error:
            errors.append(
                {"code": error.label, "line": number, "message": error.message[:MOST_SAID], "param": error.param}
            )
        if len(errors) == MAX_TOLD:
            break
    if not lines and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "the file has no requests", "param": None})
    return lines, errors


async def by_model(
    lines: list[BatchLine], model_of: Callable[[str], str], without: Collection[int] = ()
) -> dict[str, list[int]]:
    """Returns the numbers of the lines of each base model, those in ``without`` left out.

    ``model_of`` gives the model that a name stands for, "" for an unknown one.
    """
    context = contextvars.copy_context()  # a key may be bound to an adapter, and so to its model
    return await offload_if(len(lines) > INLINE_LINES, context.run, _by_model, lines, model_of, without)


def _by_model(
    lines: list[BatchLine], model_of: Callable[[str], str], without: Collection[int]
) -> dict[str, list[int]]:
    models, found = dict[str, str](), dict[str, list[int]]()
    for number, line in enumerate(lines):
        if number not in without:
            said = line.body.get("model")
            name = said if isinstance(said, str) else ""
            if name not in models:
                models[name] = model_of(name)
            found.setdefault(models[name], []).append(number)
    return found


async def answer_line(service: GenerationService, line: BatchLine, request_id: str) -> tuple[Json, bool]:
    """Answers one line; returns its entry in the batch's output file, and whether the status is 200.

    Raises errors that may pass if tried again later (Overloaded, Unavailable, QuotaExceeded).
    """
    try:
        content, status = await _content(service, line), 200
    except BatonError as error:
        if error.retryable or isinstance(error, QuotaExceeded):
            raise
        content, status = error_json(error), error.http_status
    response = {"status_code": status, "request_id": request_id, "body": content}
    answer = {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": response, "error": None}
    return answer, status == 200


async def _content(service: GenerationService, line: BatchLine) -> Json | orjson.Fragment:
    """Returns the body of the answer to ``line``, as its endpoint words it."""
    raw = orjson.dumps(line.body)
    if line.url == EMBEDDED:
        written, _ = await embedded(service, NO_HEADERS, await parsed(EmbeddingsBody, raw))
        return orjson.Fragment(written)
    kind, prepare = GENERATED[line.url]
    body = await parsed(kind, raw)
    if body.stream:
        raise InvalidRequest("stream is not possible in a batch: leave it out", "stream")
    content, _ = await full_answer(service, await prepare(service, NO_HEADERS, body))
    return content


def _line(raw: bytes, endpoint: str, seen: set[str], number: int) -> BatchLine:
    if number > MAX_LINES:
        raise InvalidRequest(f"the file has over {MAX_LINES} requests: split it", "file")
    require_light(raw, "line")
    try:
        line = msgspec.json.decode(raw, type=BatchLine)
        orjson.dumps(line.body)  # it will have to be written again: no number may be over 64 bits
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise InvalidRequest(f"line {number}: {error}", "line") from None
    if line.method != "POST" or line.url != endpoint:
        raise InvalidRequest(f"line {number}: method and url must be POST {endpoint}", "url")
    if line.custom_id in seen:
        raise InvalidRequest(f"line {number}: custom_id {line.custom_id!r} was used before", "custom_id")
    seen.add(line.custom_id)
    return line
