"""gRPC around PrefillService: protobuf in, protobuf out. Decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from baton.prefill_worker.service import PrefillCall, PrefillService
from baton.protos import convert
from baton.protos.rpc import abort
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs


class PrefillShell(stubs.PrefillWorkerServicer):
    """Prefill is one long unary call: cancelling it cancels the prompt."""

    def __init__(self, service: PrefillService):
        self._service = service

    async def Prefill(self, request: w.PrefillRequest, context: Any) -> w.PrefillResponse:
        """When the first token is known and every block is acknowledged."""
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
        )

    async def Fetch(self, request: w.FetchRequest, context: Any) -> AsyncIterator[w.FetchedBlock]:
        """The leading blocks that are cached here."""
        layout = convert.layout_from_pb(request.layout)
        try:
            async with aclosing(self._service.fetch(request.model_id, tuple(request.hashes), layout)) as pages:
                async for page in pages:
                    yield w.FetchedBlock(
                        hash=page.hash,
                        checksum=page.checksum,
                        data=page.data,
                        shard_rank=layout.shard_rank,
                        shard_count=layout.shard_count,
                    )
        except Exception as error:
            await abort(context, error)


def call_from_pb(pb: w.PrefillRequest) -> PrefillCall:
    """The noun of a PrefillRequest."""
    return PrefillCall(
        request=convert.engine_request(pb),
        model_id=pb.model_id,
        decode_address=pb.decode_address,
        lease=pb.lease,
        epoch=pb.epoch,
        held_blocks=pb.held_blocks,
        received_blocks=tuple(pb.received_blocks),
        traceparent=pb.traceparent,
    )
