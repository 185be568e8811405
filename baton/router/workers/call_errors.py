"""What the end of a gRPC call means: an error of the tree.

Knows nothing of which call it was.
"""

from __future__ import annotations

import grpc
import grpc.aio

from baton.protos.convert import error_from_pb
from baton.protos.errors import BatonError, DeadlineExceeded, Overloaded, WorkerLost, from_info
from baton.protos.rpc import ERROR_METADATA
from baton.protos.v1 import worker_pb2 as w


def said(error: grpc.aio.AioRpcError) -> BatonError | None:
    """Returns what the worker itself gave as the reason of a failed call; None when it is the transport's."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA:
            return from_info(error_from_pb(w.WireError.FromString(value)))
    return None


def from_rpc(error: grpc.aio.AioRpcError, worker_id: str) -> BatonError:
    """Returns the error of the tree that a broken call stands for."""
    text = f"{worker_id}: {error.code().name}: {error.details()}"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return WorkerLost(text)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(text)
    return Overloaded(text) if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else BatonError(text)


def is_of_worker(error: BatonError) -> bool:
    """Returns whether ``error`` says that the worker asked is gone, rather than a connection of its own.

    A worker that lost its way to another one names a field, ``decode_address`` or ``kv_transport``.
    """
    return isinstance(error, WorkerLost) and not error.param


def first_of(group: BaseExceptionGroup) -> BaseException:
    """Returns the first error in a group that may hold groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
