"""A prefill worker that really speaks gRPC, and answers by the oracle of ``fake_services``."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from baton.protos.errors import (
    BatonError,
    WorkerLost,
)
from baton.protos.rpc import abort
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from tests.router.fake_services import SERVER_SAYS, FakeDecode, FakeWorker, next_token


class FakePrefill(FakeWorker, stubs.PrefillWorkerServicer):
    """``failures`` are raised by the next calls; ``hold`` stalls; ``lose_reply`` commits and then fails."""

    role = "prefill"

    def __init__(self, worker_id: str, **fields) -> None:
        super().__init__(worker_id, **fields)
        self.decodes: dict[str, FakeDecode] = {}
        self.requests: list[w.PrefillRequest] = []
        self.failures: list[BatonError] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.lose_reply = False
        self.reply_after_s = 0.0
        self.die_at_call = False
        self.cancelled = 0
        self.running = 0
        self.most = 0

    def register(self, server: grpc.aio.Server) -> None:
        stubs.add_PrefillWorkerServicer_to_server(self, server)

    async def Prefill(self, request, context):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._prefill(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except BatonError as error:
            if error is self.engine_died and (code := SERVER_SAYS.get(type(error))):
                await context.abort(code, error.message)
            await abort(context, error)
        finally:
            self.running -= 1

    async def _prefill(self, request: w.PrefillRequest) -> w.PrefillResponse:
        if self.die_at_call:
            self._dying = asyncio.create_task(self.die())
        await self.hold.wait()
        if self.failures:
            raise self.failures.pop(0)
        if self.engine_died is not None:
            raise self.engine_died
        self.require_adapter(request.adapter_id)
        if (decode := self.decodes.get(request.decode_address)) is None:
            raise WorkerLost("nobody answers there", "decode_address")
        decode.commit(request)
        if self.lose_reply:
            raise WorkerLost("the reply was lost")
        await asyncio.sleep(self.reply_after_s)
        index = len(request.token_ids) - request.prompt_tokens
        token = next_token(request.token_ids, request.choice, request.adapter_id)
        reason = "length" if index + 1 >= request.sampling.max_tokens else ""
        stations = [c.Station(name="queue", seconds=0.1), c.Station(name="prefill", seconds=0.2)]
        stations.append(c.Station(name="transfer", seconds=0.3))
        first = c.TokenRun(output_index=index, token_ids=[token], finish_reason=reason)
        return w.PrefillResponse(first=first, cached_tokens=7, stations=stations)
