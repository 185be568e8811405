"""Carries the messages of a session with a decode worker over its gRPC call.

Knows nothing of leases, nor of when a call is made.
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio

from baton.protos.errors import Draining
from baton.protos.rpc import heed_cancel
from baton.protos.v1 import worker_pb2 as w
from baton.router.workers.call_errors import readable
from baton.router.workers.decode_session import DecodeSession


async def read_all(call: grpc.aio.StreamStreamCall, session: DecodeSession) -> None:
    """Passes every message of the worker to ``session``. Raises Draining when the worker ends the call."""
    while True:
        session.receive(await read(call, session))


async def read(call: grpc.aio.StreamStreamCall, session: DecodeSession) -> w.SessionDown:
    """Returns the worker's next message. Raises Draining when the worker ends the call in order, as it leaves."""
    down = await call.read()
    heed_cancel()
    if down is grpc.aio.EOF:
        raise Draining(f"{session.worker_id} closed the session; go on elsewhere")
    return readable(down, session.worker_id)


async def write_all(call: grpc.aio.StreamStreamCall, session: DecodeSession) -> None:
    """Sends what ``session`` queues, until the call breaks."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await session.outbox.get())
            heed_cancel()
