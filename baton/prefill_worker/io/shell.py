"""The gRPC interface of PrefillService, which converts protobuf messages. Decides nothing."""

from __future__ import annotations

import grpc.aio

from baton.prefill_worker.io.service import PrefillCall, PrefillService
from baton.protos import convert
from baton.protos.rpc import abort
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs


class PrefillShell(stubs.PrefillWorkerServicer):
    """Serves Prefill, one long unary call per prompt; cancelling the call cancels the prompt."""

    def __init__(self, service: PrefillService):
        self._service = service

    async def Prefill(self, request: w.PrefillRequest, context: grpc.aio.ServicerContext) -> w.PrefillResponse:
        """Answers when the first token is known and every block is acknowledged; aborts the call with a typed
        error.
        """
        try:
            result = await self._service.prefill(call_from_pb(request))
        except Exception as error:
            await abort(context, error)
        return w.PrefillResponse(
            first=convert.run_to_pb(result.first),
            cached_tokens=result.cached_tokens,
            shipped_blocks=result.shipped_blocks,
            shipped_bytes=result.shipped_bytes,
            stations=convert.stations_to_pb(result.stations),
            fetched_blocks=result.fetched_blocks,
            prompt_logprobs=map(convert.logprobs_to_pb, result.prompt_logprobs),
            pooled=result.pooled,
        )


def call_from_pb(pb: w.PrefillRequest) -> PrefillCall:
    """Returns a PrefillRequest as a PrefillCall."""
    return PrefillCall(
        request=convert.engine_request(pb),
        model_id=pb.model_id,
        decode_address=pb.decode_address,
        lease=pb.lease,
        epoch=pb.epoch,
        held_blocks=pb.held_blocks,
        received_blocks=tuple(pb.received_blocks),
        traceparent=pb.traceparent,
        decode_incarnation=pb.decode_incarnation,
        fetch_address=pb.fetch_address,
        fetch_blocks=pb.fetch_blocks,
        fetch_limit_s=pb.fetch_limit_s,
    )
