"""The body of a request, read under a limit: refused as soon as it is over, not after.

Knows nothing of what a body means.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from baton.protos.errors import BodyTooLarge, Cancelled


async def read_body(request: Request, limit: int) -> bytes:
    """All bytes. Raises BodyTooLarge at a declared length or at the first byte over ``limit``."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise Cancelled("the client went away while it sent its request") from None
    return bytes(body)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is over {limit} bytes: shorten it, or raise router.max_body_bytes")
