"""Errors at a gRPC border: a BatonError becomes status, details and a WireError in the trailing metadata.

Knows nothing of services. ``baton-error-bin`` carries the whole error, so that one of our processes gets its type
back; other clients read status and details.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NoReturn

import grpc
import grpc.aio

from baton.protos.convert import error_to_pb
from baton.protos.errors import BY_NAME, BatonError, to_info

ERROR_METADATA = "baton-error-bin"
UNACCEPTED = ("grpc.server_max_unrequested_time_in_server", 3600)
"""The option of each of our servers by which calls may wait that long, in seconds, until the event loop takes them.

gRPC's own 30 end the calls that a busy machine's server hasn't taken yet as CANCELLED, without a word of ours; what
bounds a wait is the caller's deadline.
"""


async def abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the call of ``context`` with ``error``; an exception that is no BatonError becomes INTERNAL.

    Never returns.
    """
    info = to_info(error)
    status = grpc.StatusCode[BY_NAME.get(info.type, BatonError).grpc_status]
    metadata = ((ERROR_METADATA, error_to_pb(info).SerializeToString()),)
    await context.abort(status, info.message, metadata)
    raise AssertionError("abort returned")


def heed_cancel() -> None:
    """Raises CancelledError if this task was cancelled, because some libraries swallow a cancellation.

    grpc.aio does if a cancellation meets a call's own end, redis-py by ``asyncio.wait_for`` (until Python 3.12) if
    it meets a write's. Call this after each await of either in a task that may be cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def settled(tasks: Collection[asyncio.Task[object]]) -> None:
    """Waits until all ``tasks`` have ended. Call it last in a TaskGroup's block, before ``heed_cancel``.

    A task that fails while the block is being left counts as a cancellation of the parent that Python 3.11 never
    takes back; one that fails inside the block is taken back.
    """
    if tasks:
        await asyncio.wait(tasks)
