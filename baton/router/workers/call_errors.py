"""Converts failed gRPC calls to the errors of protos/errors.py.

Knows nothing of which call it was.
"""

from __future__ import annotations

from typing import TypeVar

import grpc
import grpc.aio

from baton.protos.convert import error_from_pb
from baton.protos.errors import BatonError, DeadlineExceeded, Overloaded, WorkerLost, from_info
from baton.protos.rpc import ERROR_METADATA
from baton.protos.v1 import worker_pb2 as w

T = TypeVar("T")


def attached_error(error: grpc.aio.AioRpcError) -> BatonError | None:
    """Returns the error that the worker itself attached to a failed call; None if the failure is the
    transport's.
    """
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA:
            return from_info(error_from_pb(w.WireError.FromString(value)))
    return None


def from_rpc(error: grpc.aio.AioRpcError, worker_id: str) -> BatonError:
    """Returns the BatonError for a call that failed in transport: WorkerLost, DeadlineExceeded, Overloaded, or a
    plain one.
    """
    text = f"{worker_id}: {error.code().name}: {error.details()}"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return WorkerLost(text)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(text)
    return Overloaded(text) if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else BatonError(text)


def readable(reply: T | None, worker_id: str) -> T:
    """Returns a call's reply. Raises WorkerLost for None, which grpc.aio gives where a reply can't be deserialized,
    as without memory for it.
    """
    if reply is None:
        raise WorkerLost(f"what {worker_id} answered can't be read")
    return reply


def is_of_worker(error: BatonError) -> bool:
    """Returns whether ``error`` says that the worker that was called is gone.

    It doesn't where the worker lost a connection of its own to another worker: then ``error.param`` is
    ``decode_address`` or ``kv_transport``.
    """
    return isinstance(error, WorkerLost) and not error.param


def first_of(group: BaseExceptionGroup) -> BaseException:
    """Returns the first exception in a group, which may hold nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
