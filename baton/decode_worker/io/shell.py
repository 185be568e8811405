"""The gRPC interface of DecodeService, which converts protobuf messages. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from baton.decode_worker.io.router_session import Reply, RouterSession, TokenFrame
from baton.decode_worker.io.service import DecodeService
from baton.protos import channel as ch
from baton.protos import convert, version
from baton.protos.errors import ErrorInfo, InvalidRequest
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import abort
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs

log = logging.getLogger("baton.decode")


class DecodeShell(stubs.DecodeWorkerServicer):
    """Serves Session, one bidirectional stream per router."""

    def __init__(self, service: DecodeService, info: Callable[[], WorkerInfo]):
        self._service = service
        self._info = info

    async def Session(
        self, incoming: AsyncIterator[w.SessionUp], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[w.SessionDown]:
        """Serves a router until it leaves or is lost, either of which cancels its requests.

        Aborts the call with InvalidRequest if the first message isn't a Hello of a compatible protocol version.
        """
        hello = await anext(aiter(incoming), None)
        if hello is None or not hello.HasField("hello"):
            await abort(context, InvalidRequest("the first message of a session is Hello", "hello"))
        if not version.runs_with(hello.hello.protocol):
            text = version.refusal(f"router {hello.hello.router_id}", hello.hello.protocol)
            await abort(context, InvalidRequest(text, "protocol"))
        session = self._service.open_session(hello.hello.router_id)
        reading = asyncio.create_task(self._read(incoming, session), name=f"session of {session.router_id}")
        try:
            yield w.SessionDown(welcome=w.Welcome(worker=convert.info_to_pb(self._info())))
            async for item in session.outgoing():
                yield down_to_pb(item)
        finally:
            reading.cancel()
            self._service.close_session(session)

    async def _read(self, incoming: AsyncIterator[w.SessionUp], session: RouterSession) -> None:
        try:
            async for message in incoming:
                if not message.ByteSize():  # grpc.aio sends it for one that it can't serialize, and goes on
                    log.warning("router %s sent a message without content; its session ends", session.router_id)
                    return
                self._take(message, session)
        finally:
            session.end()

    def _take(self, message: w.SessionUp, session: RouterSession) -> None:
        kind = message.WhichOneof("message")
        if kind == "admit":
            a = message.admit
            request = convert.engine_request(a)
            self._service.admit(session, request, a.model_id, a.local, a.ttl_seconds, a.traceparent)
        elif kind == "rearm":
            self._service.rearm(session, message.rearm.request_id, message.rearm.lease, message.rearm.epoch)
        elif kind == "cancel":
            self._service.cancel(session, message.cancel.request_id, message.cancel.reason)


def down_to_pb(item: Reply | TokenFrame) -> w.SessionDown:
    """Returns one queued item as a protobuf message."""
    if isinstance(item, TokenFrame):
        return _frame(item)
    message, request_id = item.message, item.request_id
    if isinstance(message, ch.Admitted):
        return w.SessionDown(
            admitted=w.Admitted(
                request_id=request_id,
                lease=message.lease,
                epoch=message.epoch,
                held_blocks=message.held_blocks,
                pages=len(message.pages),
            )
        )
    if isinstance(message, ch.Rearmed):
        rearmed = w.Rearmed(request_id=request_id, epoch=message.epoch, received_blocks=message.received_blocks)
        return w.SessionDown(rearmed=rearmed)
    error = convert.error_to_pb(message.error or ErrorInfo("", ""))
    if isinstance(message, ch.Refused):
        return w.SessionDown(refused=w.Refused(request_id=request_id, error=error))
    return w.SessionDown(ended=w.Ended(request_id=request_id, error=error))


def _frame(frame: TokenFrame) -> w.SessionDown:
    down = w.SessionDown()
    tokens = down.tokens
    tokens.step = frame.step
    for request_id, output in frame.outputs.items():
        _write_output(tokens.outputs.add(), request_id, output)
    return down


def _write_output(out: w.RequestTokens, request_id: str, output: ch.Output) -> None:
    """Writes one request's outputs in place; only its first and last ones have more than a run."""
    out.request_id = request_id
    convert.write_run(out.run, output.run)
    if output.cached_tokens:
        out.cached_tokens = output.cached_tokens
    if output.stations:
        out.stations.extend(convert.stations_to_pb(output.stations))
    if output.prompt_logprobs:
        out.prompt_logprobs.extend(map(convert.logprobs_to_pb, output.prompt_logprobs))
    if output.pooled:
        out.pooled = output.pooled
