"""Metadata of a gRPC call as REST's headers, with the call's own deadline as REST's timeout.

Knows nothing of what any header asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import grpc.aio

TIMEOUT = "x-request-timeout"
LEAST_S = 0.001  # a deadline that has passed is one that passes at once


def headers_of(context: grpc.aio.ServicerContext) -> Mapping[str, str]:
    """Returns the call's text metadata by name; TIMEOUT is the sooner of the call's deadline and what TIMEOUT asks
    for.
    """
    headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    remaining = context.time_remaining()
    if remaining is None:
        return headers
    remaining = max(remaining, LEAST_S)
    return headers if _refused_or_sooner(headers.get(TIMEOUT), remaining) else headers | {TIMEOUT: str(remaining)}


def _refused_or_sooner(asked: str | None, remaining: float) -> bool:
    """Returns whether the timeout ``asked`` for stays: it ends sooner, or is none and will be refused."""
    try:
        return not float(asked or math.inf) > remaining
    except ValueError:
        return True
