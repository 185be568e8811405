"""The gRPC service ``baton.v1.Inference``: what the REST surface offers, with deadlines and rich errors.

Knows nothing of workers or policies. A cancelled or expired call cancels its coroutine, which closes the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import grpc
from google.protobuf.message import Message

from baton.protos.convert import logprobs_to_pb, sampling_fields
from baton.protos.errors import InvalidRequest
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as pb_grpc
from baton.router.access.headers import clean_request_id, clean_traceparent
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.service import CHARS_PER_TOKEN, LEAST_DETOKENIZED, GenerationService
from baton.router.answer.stream import AnswerStream, TextDelta, open_answer
from baton.router.answer.validate import check_count, check_ids, check_tokenized
from baton.router.api.body import read_body_of
from baton.router.api.grpc.errors import grpc_errors
from baton.router.api.openai.shapes import collected
from baton.router.api.openai.truncation import PromptCut, TruncatedBody, prompt_ids
from baton.router.request.context import RequestContext
from baton.router.text.catalog import ModelEntry
from baton.router.text.model import TextModel
from baton.router.text.room import PromptRoom

Context: TypeAlias = grpc.aio.ServicerContext
MAX_LISTED, MAX_MESSAGES = 4096, 8192  # entries of one list
ROLES = ("system", "user", "assistant", "tool")


class InferenceService(pb_grpc.InferenceServicer):
    """Serves ``baton.v1.Inference``, one method per rpc; a BatonError becomes the call's rich status."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Generates, and returns all choices with the usage once they have ended."""
        async with grpc_errors(context):
            generation, text = await self._prepared(request, context)
            with open_answer(self._service, generation, text) as answer:
                return await _whole(request, answer)

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Generates, yielding pieces as they come; the last chunk has the usage."""
        async with grpc_errors(context):
            generation, text = await self._prepared(request, context)
            with open_answer(self._service, generation, text) as answer:
                async for chunk in _chunks(request, answer):
                    yield chunk

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Returns the token ids of a text, and the model's context length in tokens."""
        async with grpc_errors(context):
            entry = await self._service.catalog.resolve(request.model)
            check_tokenized(len(request.text), entry.max_model_len, "text")
            await self._service.quotas.charge_tokenizer(entry, len(request.text) // CHARS_PER_TOKEN)
            ids = await self._service.catalog.text(entry).encode(request.text, not request.skip_special_tokens)
            return pb.TokenizeResponse(ids=ids, max_model_len=entry.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Returns the text of token ids, special tokens included."""
        async with grpc_errors(context):
            entry = await self._service.catalog.resolve(request.model)
            await self._service.quotas.charge_tokenizer(entry, len(request.ids))
            check_count("ids", len(request.ids), max(LEAST_DETOKENIZED, entry.max_model_len))
            check_ids(request.ids, entry.vocab_size, "ids")
            text = await self._service.catalog.text(entry).decode(list(request.ids), skip_special_tokens=False)
            return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models and adapters that are served now."""
        async with grpc_errors(context):
            entries = self._service.catalog.entries()
            cards = [pb.ModelCard(id=e.name, max_model_len=e.max_model_len, parent=parent_of(e)) for e in entries]
            return pb.ListModelsResponse(models=cards)

    async def _prepared(self, request: pb.GenerateRequest, context: Context) -> tuple[Generation, TextModel]:
        entry = await self._service.catalog.resolve(request.model, request.adapter)
        text = self._service.catalog.text(entry)
        prompt = request.WhichOneof("prompt")
        if prompt is None:
            raise InvalidRequest("give one of text, tokens and chat", "prompt")
        require_short(request)
        require_short(request.sampling)
        if request.sampling.pooling:
            raise InvalidRequest("pooling is for /v1/embeddings: leave it out", "pooling")

        cut, room = _cut(request, entry), PromptRoom(entry.max_model_len, prompt)

        async def prompts() -> list[Sequence[int]]:
            return [await _prompt_ids(request, text, cut, room)]

        options = self._options(request, context, prompt)
        return await self._service.prepare(entry, options, prompts), text

    def _options(self, request: pb.GenerateRequest, context: Context, prompt: str) -> GenerationOptions:
        metadata = dict(context.invocation_metadata() or ())
        return GenerationOptions(
            sampling=sampling_fields(request.sampling),
            n=request.n or 1,
            stops=tuple(request.stop),
            prediction=request.prediction,
            names={"prompt": prompt},
            continues=prompt != "chat" or request.chat.continue_final_message,
            context=RequestContext(
                asked_id=clean_request_id(request.request_id),
                deadline=self._service.deadline(context.time_remaining()),
                traceparent=clean_traceparent(str(metadata.get("traceparent", ""))),
            ),
        )


def parent_of(entry: ModelEntry) -> str:
    """Returns the id of the base model of an adapter's entry; "" for a base model."""
    return entry.model_id if entry.adapter is not None else ""


def require_short(message: Message) -> None:
    """Raises InvalidRequest if a list or map directly in ``message`` has over MAX_LISTED entries."""
    for field, value in message.ListFields():
        if field.is_repeated:
            check_count(field.name, len(value), MAX_LISTED)


def _cut(request: pb.GenerateRequest, entry: ModelEntry) -> PromptCut | None:
    said = {"truncate_prompt_tokens": request.truncate_prompt_tokens, "truncation_side": request.truncation_side}
    body = read_body_of(TruncatedBody, {name: value for name, value in said.items() if value})
    return body.cut(entry.max_model_len, max(1, request.sampling.max_tokens))


async def _prompt_ids(
    request: pb.GenerateRequest, text: TextModel, cut: PromptCut | None, room: PromptRoom
) -> Sequence[int]:
    if room.param == "text":
        return await prompt_ids(text, request.text, True, cut, room)
    if room.param == "tokens":
        return await prompt_ids(text, request.tokens.ids, False, cut, room)
    check_count("chat.messages", len(request.chat.messages), MAX_MESSAGES)
    messages = [_message(at, message) for at, message in enumerate(request.chat.messages)]
    if not messages:
        raise InvalidRequest("chat.messages is empty: give at least one", "chat.messages")
    goes_on = request.chat.continue_final_message
    ids = await text.encode_chat(messages, continues=goes_on, room=room if cut is None else None)
    return ids if cut is None else cut.of(ids)


def _message(at: int, message: pb.ChatMessage) -> dict[str, str]:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"chat.messages[{at}].role is {message.role!r}: give one of {', '.join(ROLES)}", "chat.messages"
        )
    return {"role": message.role, "content": message.content}


async def _whole(request: pb.GenerateRequest, answer: AnswerStream) -> pb.GenerateResponse:
    parts: list[list[TextDelta]] = [[] for _ in range(answer.count)]
    async for piece in answer:
        parts[piece.index].append(piece)
    return pb.GenerateResponse(
        request_id=_request_id(request, answer),
        model=_entry(answer).name,
        choices=[_choice(request, piece) for piece in collected(parts)],
        usage=_usage(answer),
    )


async def _chunks(request: pb.GenerateRequest, answer: AnswerStream) -> AsyncIterator[pb.GenerateChunk]:
    """The piece that ends the last choice carries the usage."""
    left = answer.count
    request_id, model = _request_id(request, answer), _entry(answer).name
    async for piece in answer:
        left -= bool(piece.finish_reason)
        yield pb.GenerateChunk(
            request_id=request_id,
            model=model,
            choices=[_choice(request, piece)],
            usage=None if left else _usage(answer),
        )


def _choice(request: pb.GenerateRequest, piece: TextDelta) -> pb.Choice:
    return pb.Choice(
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids if request.return_token_ids else (),
        logprobs=[logprobs_to_pb(entry) for entry in piece.logprobs],
        finish_reason=piece.finish_reason,
        prompt_logprobs=[logprobs_to_pb(entry) for entry in piece.prompt_logprobs or ()],
    )


def _usage(answer: AnswerStream) -> pb.Usage:
    usage = answer.usage()
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        accepted_prediction_tokens=usage.accepted_drafts,
        rejected_prediction_tokens=usage.rejected_drafts,
    )


def _request_id(request: pb.GenerateRequest, answer: AnswerStream) -> str:
    return clean_request_id(request.request_id) or answer.generation.request_id


def _entry(answer: AnswerStream) -> ModelEntry:
    return answer.generation.entry
