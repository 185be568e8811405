"""The Open Inference Protocol over gRPC: ``inference.GRPCInferenceService``, Triton's streaming included.

Knows nothing of what tensors mean (``open_inference.tensors``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import grpc
import msgspec

from baton.protos.errors import BatonError, InvalidRequest
from baton.protos.json import Json
from baton.protos.v1 import open_inference_pb2 as pb
from baton.protos.v1 import open_inference_pb2_grpc as pb_grpc
from baton.router.access.caller import CALLER
from baton.router.answer.service import GenerationService
from baton.router.answer.stream import open_answer
from baton.router.answer.validate import check_count
from baton.router.api.grpc.errors import grpc_errors
from baton.router.api.grpc.metadata import headers_of
from baton.router.api.large import MAX_NUMBERS
from baton.router.api.open_inference import tensors as oip
from baton.router.api.open_inference.tensors import Tensor, TensorValue
from baton.router.api.openai.prepared_call import PreparedCall, full_answer
from baton.router.api.openai.schemas import CompletionBody
from baton.router.api.openai.shapes import usage_json

Context: TypeAlias = grpc.aio.ServicerContext
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


class OpenInferenceService(pb_grpc.GRPCInferenceServiceServicer):
    """Serves ``inference.GRPCInferenceService``, one method per rpc."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Answers that the server lives."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Answers whether a request could be given to a worker now."""
        return pb.ServerReadyResponse(ready=self._service.serving.ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Answers whether the model is served now; false for an unknown model or version."""
        is_known = request.version in ("", oip.VERSION)
        return pb.ModelReadyResponse(ready=is_known and oip.served(self._service, request.name))

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        """Answers with the server's name, version and extensions."""
        return pb.ServerMetadataResponse(**oip.server_metadata())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Answers with the names, datatypes and shapes of a model's input and output tensors."""
        async with grpc_errors(context):
            oip.require_version(request.version)
            return pb.ModelMetadataResponse(
                **oip.model_metadata(await self._service.catalog.described(request.name))
            )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Answers with the whole generation as tensors."""
        async with grpc_errors(context):
            return await self._whole(request, context, _body(request, stream=False))

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Answers each request in turn, in pieces; an error ends that request, and the stream goes on.

        A key that was revoked meanwhile ends the stream.
        """
        async with grpc_errors(context):
            async for request in requests:
                self._renew_caller()
                try:
                    async for response in self._pieces(request, context):
                        yield pb.ModelStreamInferResponse(infer_response=response)
                except BatonError as error:
                    failed = pb.ModelInferResponse(id=request.id, model_name=request.model_name)
                    yield pb.ModelStreamInferResponse(error_message=error.message, infer_response=failed)

    def _renew_caller(self) -> None:
        """Gives the caller its key's current rates and rights. Raises Unauthenticated if the key was revoked."""
        caller = CALLER.get()
        CALLER.set(msgspec.structs.replace(caller, key=self._service.quotas.gate.current(caller.key)))

    async def _pieces(
        self, request: pb.ModelInferRequest, context: Context
    ) -> AsyncIterator[pb.ModelInferResponse]:
        body = _body(request, stream=True)
        if not body.stream:
            response = await self._whole(request, context, body)
            response.parameters[FINAL].bool_param = True
            yield response
            return
        call = await self._call(request, context, body)
        with open_answer(self._service, call.generation, call.text) as answer:
            left = answer.count
            async for piece in answer:
                left -= bool(piece.finish_reason)
                for chunk in call.shape.chunks(piece):
                    usage = {} if left else {"usage": usage_json(answer.usage())}
                    response = _response(request, chunk | usage)
                    response.parameters[FINAL].bool_param = not left
                    if answer.count > 1:
                        response.parameters[INDEX].int64_param = piece.index
                    yield response

    async def _whole(
        self, request: pb.ModelInferRequest, context: Context, body: CompletionBody
    ) -> pb.ModelInferResponse:
        content, _ = await full_answer(self._service, await self._call(request, context, body))
        return _response(request, content)

    async def _call(self, request: pb.ModelInferRequest, context: Context, body: CompletionBody) -> PreparedCall:
        return await oip.call_of(self._service, headers_of(context), body, request.model_version)


def _body(request: pb.ModelInferRequest, stream: bool) -> CompletionBody:
    parameters = {name: _parameter(value) for name, value in request.parameters.items()}
    return oip.body_of(request.model_name, _tensors(request), parameters, stream)


INDEX = "index"  # the parameter that says which of several answers a piece is of
FINAL = "triton_final_response"  # the parameter that marks a request's last response
MAX_INPUTS = 64  # tensors of one request


def _tensors(request: pb.ModelInferRequest) -> list[Tensor]:
    raw = request.raw_input_contents
    check_count("inputs", max(len(raw), len(request.inputs)), MAX_INPUTS)
    if raw and len(raw) != len(request.inputs):
        text = f"{len(raw)} raw contents for {len(request.inputs)} inputs: give one each, or none"
        raise InvalidRequest(text, "raw_input_contents")
    tensors = []
    for at, one in enumerate(request.inputs):
        values = oip.unpacked(one.name, one.datatype, raw[at]) if raw else _contents(one)
        tensors.append(Tensor(one.name, one.datatype, list(one.shape), values))
    return tensors


def _contents(one: pb.ModelInferRequest.InferInputTensor) -> Sequence[TensorValue]:
    if one.datatype not in _CONTENTS:
        raise InvalidRequest(f"{one.name} has datatype {one.datatype!r}: use {', '.join(_CONTENTS)}", one.name)
    found = getattr(one.contents, _CONTENTS[one.datatype])
    check_count(one.name, len(found), MAX_NUMBERS)
    return list(found)


def _parameter(value: pb.InferParameter) -> object:
    kind = value.WhichOneof("parameter_choice")
    return getattr(value, kind) if kind else None


def _response(request: pb.ModelInferRequest, content: Json) -> pb.ModelInferResponse:
    outputs = oip.outputs_of(content, [output.name for output in request.outputs])
    return pb.ModelInferResponse(
        model_name=content["model"],
        model_version=oip.VERSION,
        id=request.id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(name=t.name, datatype=t.datatype, shape=t.shape)
            for t in outputs
        ],
        raw_output_contents=map(oip.packed, outputs),
    )
