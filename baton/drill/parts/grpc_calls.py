"""Calls of the router's gRPC service by simulated clients, and what their replies hold.

Knows nothing of what an answer must be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from google.rpc import error_details_pb2, status_pb2

from baton.drill.checks.text import TextReply
from baton.drill.machines.network import Network
from baton.drill.parts.engine import MODEL_ID
from baton.drill.parts.http import NUMBER, WIRE_NUMBER
from baton.drill.rpc.client import Channel
from baton.drill.scenario import Request
from baton.protos import convert
from baton.protos.json import Json
from baton.protos.v1 import inference_pb2 as pb
from baton.protos.v1 import inference_pb2_grpc as stubs
from baton.protos.v1.common_pb2 import TokenLogprobs

DETAILS = "grpc-status-details-bin"


class GrpcCall:
    """One call of ``router`` by a client of its own; ``left`` is set as the client leaves."""

    def __init__(self, network: Network, router: str, request: Request) -> None:
        self.left, self.chunks = asyncio.Event(), list[pb.GenerateChunk | pb.GenerateResponse]()
        self._request = request
        self._channel = Channel(network, f"client-{request.number}", f"{router}:8001")

    async def play(self) -> TextReply:
        """Asks and reads at the client's pace; returns what came, with the error's code where the call failed."""
        request = self._request
        metadata = ((WIRE_NUMBER, str(request.number)),)
        stub = stubs.InferenceStub(self._channel)
        method = stub.GenerateStream if request.over_http == "stream" else stub.Generate
        call = method(asked_over_grpc(request), timeout=request.deadline_after, metadata=metadata)
        leaving = asyncio.ensure_future(self.left.wait())
        leaving.add_done_callback(lambda _: call.cancel())
        try:
            await self._read(call)
            return reply_of(self.chunks, "")
        except grpc.aio.AioRpcError as error:
            return reply_of(self.chunks, code_of(error))
        except asyncio.CancelledError:
            if not self.left.is_set():
                raise
            return reply_of(self.chunks, "left")
        finally:
            leaving.cancel()
            await self._channel.close()

    async def _read(self, call: grpc.aio.Call) -> None:
        if self._request.over_http == "whole":
            self.chunks.append(await call)
            return
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
        model=MODEL_ID,
        tokens=pb.TokenIds(ids=request.prompt),
        sampling=convert.sampling_to_pb(request.sampling),
        n=request.n,
        stop=request.stops,
        adapter=request.adapter,
        return_token_ids=True,
    )


def code_of(error: grpc.aio.AioRpcError) -> str:
    """Returns the code of a failed call: the reason in its details, or the name of its status where it has none."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return info.reason.lower()
    return f"status {error.code().name}"


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
