"""The gRPC service ``baton.v1.Inference``: what the REST surface offers, with deadlines and rich errors.

Knows nothing of workers or policies. A cancelled or expired call cancels its coroutine, which closes the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import grpc
import msgspec
from google.protobuf.message import Message

from baton.protos.convert import sampling_fields
from baton.protos.errors import InvalidRequest
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as pb_grpc
from baton.router.access.caller import CALLER
from baton.router.access.headers import clean_request_id, clean_traceparent
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.service import CHARS_PER_TOKEN, LEAST_DETOKENIZED, GenerationService
from baton.router.answer.stream import AnswerStream, TextDelta, open_answer
from baton.router.answer.validate import check_count, check_ids, check_tokenized
from baton.router.api.body import read_body_of
from baton.router.api.grpc.conversation import NAMES, conversation_body
from baton.router.api.grpc.errors import grpc_errors
from baton.router.api.grpc.metadata import headers_of
from baton.router.api.grpc.wording import ChoiceWording
from baton.router.api.large import INLINE_BYTES, offload_if
from baton.router.api.openai.prepared_call import Headers, chat_generation, timeout_s
from baton.router.api.openai.shapes import collected
from baton.router.api.openai.truncation import PromptCut, TruncatedBody, prompt_ids
from baton.router.request.context import RequestContext
from baton.router.text.catalog import ModelEntry
from baton.router.text.chat_reader import AnswerFormat
from baton.router.text.model import TextModel
from baton.router.text.room import PromptRoom

Context: TypeAlias = grpc.aio.ServicerContext
Prepared: TypeAlias = tuple[Generation, TextModel, AnswerFormat | None]
MAX_LISTED = 4096  # entries of one list
INLINE_MESSAGES = 64  # of a conversation, converted on the loop: some 10 us each


class InferenceService(pb_grpc.InferenceServicer):
    """Serves ``baton.v1.Inference``, one method per rpc; a BatonError becomes the call's rich status."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Generates, and returns all choices with the usage once they have ended."""
        async with grpc_errors(context):
            generation, text, form = await self._prepared(request, context)
            with open_answer(self._service, generation, text) as answer:
                return await _whole(request, answer, ChoiceWording(form, request.return_token_ids))

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Generates, yielding pieces as they come; the last chunk has the usage."""
        async with grpc_errors(context):
            generation, text, form = await self._prepared(request, context)
            with open_answer(self._service, generation, text) as answer:
                async for chunk in _chunks(request, answer, ChoiceWording(form, request.return_token_ids)):
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
            check_count("ids", len(request.ids), max(LEAST_DETOKENIZED, entry.max_model_len))
            check_ids(request.ids, entry.vocab_size, "ids")
            await self._service.quotas.charge_tokenizer(entry, len(request.ids))
            text = await self._service.catalog.text(entry).decode(list(request.ids), skip_special_tokens=False)
            return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models and adapters that are served now."""
        async with grpc_errors(context):
            entries = self._service.catalog.entries()
            cards = [pb.ModelCard(id=e.name, max_model_len=e.max_model_len, parent=parent_of(e)) for e in entries]
            return pb.ListModelsResponse(models=cards)

    async def _prepared(self, request: pb.GenerateRequest, context: Context) -> Prepared:
        named_by_caller(request)
        prompt, headers = request.WhichOneof("prompt"), headers_of(context)
        deadline = self._service.deadline(timeout_s(headers))
        entry = await self._service.catalog.resolve(request.model, request.adapter)
        if prompt is None:
            raise InvalidRequest("give one of text, tokens and chat", "prompt")
        require_short(request)
        require_short(request.sampling)
        if request.sampling.pooling:
            raise InvalidRequest("pooling is for /v1/embeddings: leave it out", "pooling")
        if prompt == "chat":
            return await self._conversation(request, headers, entry)
        text = self._service.catalog.text(entry)
        cut, room = _cut(request, entry), PromptRoom(entry.max_model_len, prompt)

        async def prompts() -> list[Sequence[int]]:
            if prompt == "text":
                return [await prompt_ids(text, request.text, True, cut, room)]
            return [await prompt_ids(text, request.tokens.ids, False, cut, room)]

        options = GenerationOptions(
            sampling=sampling_fields(request.sampling),
            n=request.n or 1,
            stops=tuple(request.stop),
            prediction=request.prediction,
            names={"prompt": prompt},
            context=RequestContext(deadline=deadline, traceparent=clean_traceparent(headers.get("traceparent"))),
        )
        return await self._service.prepare(entry, options, prompts), text, None

    async def _conversation(self, request: pb.GenerateRequest, headers: Headers, entry: ModelEntry) -> Prepared:
        is_large = request.ByteSize() > INLINE_BYTES or len(request.chat.messages) > INLINE_MESSAGES
        body = await offload_if(is_large, conversation_body, request)
        return await chat_generation(self._service, headers, body, dict(NAMES), must_bind=True, entry=entry)


def named_by_caller(request: pb.GenerateRequest) -> None:
    """Gives the call the id that ``request`` asks for, if that is well formed; ``explain`` finds it by that."""
    if asked_id := clean_request_id(request.request_id):
        CALLER.set(msgspec.structs.replace(CALLER.get(), asked_id=asked_id))


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


async def _whole(request: pb.GenerateRequest, answer: AnswerStream, wording: ChoiceWording) -> pb.GenerateResponse:
    parts: list[list[TextDelta]] = [[] for _ in range(answer.count)]
    async for piece in answer:
        parts[piece.index].append(piece)
    sampling = answer.generation.samplings[0]
    is_scored = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    choices = await offload_if(is_scored, lambda: [wording.choice(piece) for piece in collected(parts)])
    return pb.GenerateResponse(
        request_id=_request_id(request, answer),
        model=_entry(answer).name,
        choices=choices,
        usage=_usage(answer),
    )


async def _chunks(
    request: pb.GenerateRequest, answer: AnswerStream, wording: ChoiceWording
) -> AsyncIterator[pb.GenerateChunk]:
    """The piece that ends the last choice carries the usage."""
    left = answer.count
    request_id, model = _request_id(request, answer), _entry(answer).name
    async for piece in answer:
        left -= bool(piece.finish_reason)
        yield pb.GenerateChunk(
            request_id=request_id,
            model=model,
            choices=[wording.choice(piece)],
            usage=None if left else _usage(answer),
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
