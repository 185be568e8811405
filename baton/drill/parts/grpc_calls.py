"""Calls of the router's gRPC service by simulated clients, and what their replies hold.

Knows nothing of what an answer must be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from google.protobuf import message as protobuf
from google.rpc import error_details_pb2, status_pb2

from baton.drill.checks.tensors import read_messages, said_code
from baton.drill.checks.text import TextReply
from baton.drill.machines.network import Network
from baton.drill.parts.engine import model_id_of
from baton.drill.parts.http import NUMBER, SLO_HEADER, WIRE_NUMBER, fields_of, key_of
from baton.drill.parts.tensor_calls import tensors_message
from baton.drill.rpc.client import Channel
from baton.drill.rpc.stream import Message
from baton.drill.scenario import Request
from baton.protos import convert
from baton.protos.json import Json
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as stubs
from baton.protos.v1 import open_inference_pb2_grpc as tensor_stubs
from baton.protos.v1.common_pb2 import TokenLogprobs

DETAILS = "grpc-status-details-bin"


class GrpcCall:
    """One call of ``router`` by a client of its own; ``left`` is set as the client leaves."""

    def __init__(self, network: Network, router: str, request: Request) -> None:
        self.left, self.chunks = asyncio.Event(), list[Message]()
        self.advised = False  # whether an error came with the time after which to ask again
        self._request = request
        self._channel = Channel(network, f"client-{request.number}", f"{router}:8001")

    async def play(self) -> TextReply:
        """Asks and reads at the client's pace; returns what came, with the error's code where the call failed."""
        request = self._request
        metadata = [(WIRE_NUMBER, str(request.number))]
        if key := key_of(request):
            metadata.append(("authorization", f"Bearer {key}"))
        if request.slo_ttft_s:
            metadata.append((SLO_HEADER, str(round(1000 * request.slo_ttft_s))))
        call = self._call(tuple(metadata))
        leaving = asyncio.ensure_future(self.left.wait())
        leaving.add_done_callback(lambda _: call.cancel())
        try:
            await self._read(call)
            return self._reply("")
        except grpc.aio.AioRpcError as error:
            self.advised = advises(error)
            return self._reply(code_of(error))
        except asyncio.CancelledError:
            if not self.left.is_set():
                raise
            return self._reply("left")
        finally:
            leaving.cancel()
            await self._channel.close()

    def _call(self, metadata: tuple[tuple[str, str], ...]) -> grpc.aio.Call:
        request, streams = self._request, self._request.over_http == "stream"
        if not request.tensors:
            stub = stubs.InferenceStub(self._channel)
            method = stub.GenerateStream if streams else stub.Generate
            return method(asked_over_grpc(request), timeout=request.deadline_after, metadata=metadata)
        tensors = tensor_stubs.GRPCInferenceServiceStub(self._channel)
        if streams:
            return tensors.ModelStreamInfer(timeout=request.deadline_after, metadata=metadata)
        message = tensors_message(request, fields_of(request))
        return tensors.ModelInfer(message, timeout=request.deadline_after, metadata=metadata)

    def _reply(self, error: str) -> TextReply:
        """Returns what came, up to the call's ``error``."""
        if not self._request.tensors:
            return reply_of(self.chunks, error)
        if self._request.over_http == "whole":
            return read_messages(self._request, self.chunks, error)
        said = next((said_code(one.error_message) for one in self.chunks if one.error_message), "")
        return read_messages(self._request, [one.infer_response for one in self.chunks], error or said)

    async def _read(self, call: grpc.aio.Call) -> None:
        if self._request.over_http == "whole":
            self.chunks.append(await call)
            return
        if self._request.tensors:
            await call.write(tensors_message(self._request, fields_of(self._request)))
            await call.done_writing()
        async for chunk in call:
            self.chunks.append(chunk)
            if self._request.read_pause:
                await asyncio.sleep(self._request.read_pause)


class Numbering(grpc.aio.ServerInterceptor):
    """Tells the environment which client's call comes, as the witnesses know it."""

    async def intercept_service(self, continuation: object, details: grpc.HandlerCallDetails) -> object:
        """Sets NUMBER and goes on."""
        number = dict(details.invocation_metadata or ()).get(WIRE_NUMBER)
        NUMBER.set(None if number is None else int(number))
        return await continuation(details)  # type: ignore[operator]


def asked_over_grpc(request: Request) -> pb.GenerateRequest:
    """Returns ``request`` as a client of the gRPC service sends it."""
    return pb.GenerateRequest(
        model=model_id_of(request.model),
        tokens=pb.TokenIds(ids=request.prompt),
        sampling=convert.sampling_to_pb(request.sampling),
        n=request.n,
        stop=request.stops,
        adapter=request.adapter,
        return_token_ids=True,
    )


def code_of(error: grpc.aio.AioRpcError) -> str:
    """Returns the code of a failed call: the reason in its details, or the name of its status where it has none."""
    info = error_details_pb2.ErrorInfo()
    return info.reason.lower() if _detailed(error, info) else f"status {error.code().name}"


def advises(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether the details of a failed call say when to ask again."""
    info = error_details_pb2.RetryInfo()
    return _detailed(error, info) and info.retry_delay.ToNanoseconds() > 0


def _detailed(error: grpc.aio.AioRpcError, kind: protobuf.Message) -> bool:
    """Fills in ``kind`` from the error's details; returns whether they have one."""
    whole = (value for key, value in error.trailing_metadata() or () if key == DETAILS)
    return any(detail.Unpack(kind) for value in whole for detail in status_pb2.Status.FromString(value).details)


def reply_of(chunks: Sequence[pb.GenerateChunk | pb.GenerateResponse], error: str) -> TextReply:
    """Returns what a call's messages held, up to its ``error``."""
    texts: dict[int, str] = {}
    scored: dict[int, int] = {}
    finishes: dict[int, list[str]] = {}
    prompts: dict[int, list[Json | None]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        index = choice.index
        texts[index] = texts.get(index, "") + choice.text
        scored[index] = scored.get(index, 0) + len(choice.logprobs)
        finishes.setdefault(index, []).extend([choice.finish_reason] if choice.finish_reason else [])
        if choice.prompt_logprobs:
            prompts[index] = [None, *map(_scores, choice.prompt_logprobs)]
    told = [at for at, chunk in enumerate(chunks) if chunk.HasField("usage")]
    usage = None
    if told:
        counts = chunks[told[-1]].usage
        usage = {"prompt_tokens": counts.prompt_tokens, "completion_tokens": counts.completion_tokens}
    return TextReply(texts, scored, finishes, usage, error, told == [len(chunks) - 1], prompts)


def _scores(one: TokenLogprobs) -> Json:
    return {str(t.token_id): {"logprob": t.logprob} for t in (one.chosen, *one.top)}
