"""Converts errors to gRPC's rich error model (google.rpc.Status in the trailers, AIP-193).

Knows nothing of the services that raise them. An exception that is no BatonError becomes the status of a plain
BatonError; its details stay in the log.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from baton.protos.convert import error_to_pb
from baton.protos.errors import BatonError, to_info

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
log = logging.getLogger(__name__)


@asynccontextmanager
async def grpc_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call of ``context`` with the right gRPC status if the block raises; AbortError says that it has
    ended.
    """
    try:
        yield
    except BatonError as error:
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("a gRPC call failed")
        await _abort(context, BatonError("The server had an error; its log says which."))


def rich_status(error: BatonError) -> status_pb2.Status:
    """Returns ``error`` as google.rpc.Status with details: ErrorInfo, BadRequest if a field is named, RetryInfo if
    a retry time is known, and Baton's WireError.
    """
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.label.upper(), domain=DOMAIN)]
    if error.param:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s:
        delay = Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    details.append(error_to_pb(to_info(error)))
    code = grpc.StatusCode[error.grpc_status].value[0]
    return status_pb2.Status(code=code, message=error.message, details=map(_packed, details))


async def _abort(context: grpc.aio.ServicerContext, error: BatonError) -> None:
    trailers = ((DETAILS_KEY, rich_status(error).SerializeToString()),)
    try:
        await context.abort(grpc.StatusCode[error.grpc_status], error.message, trailers)
    except grpc.aio.InternalError:  # the call is over: its deadline passed a moment ago, or its client left
        raise grpc.aio.AbortError("the call ended before its error was told") from None


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
