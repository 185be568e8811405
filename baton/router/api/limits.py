"""Reads request bodies under two limits: a body's own, and that of all bodies in flight; refuses as soon as one is
exceeded.

Knows nothing of what a body means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from baton.protos.errors import BodyTooLarge, Cancelled, InvalidRequest, Overloaded

RETRY_AFTER_S = 1.0  # seconds after which a client may try again


class BodiesInFlight:
    """Counts the bytes of the bodies of all requests that aren't answered yet, of REST and gRPC, ``most`` at once;
    ``held`` is the count.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    @contextmanager
    def counting(self, receive: Receive) -> Iterator[Receive]:
        """Wraps one request's ASGI ``receive`` to count its body's bytes until the block ends.

        The wrapped ``receive`` raises Overloaded over the limit, BodyTooLarge if the body alone is over it.
        """
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            self._take(size, taken)
            taken += size
            return message

        try:
            yield counted
        finally:
            self.held -= taken

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Counts a message of ``size`` bytes until the block ends.

        Raises Overloaded over the limit, BodyTooLarge if the message alone is over it.
        """
        self._take(size)
        try:
            yield
        finally:
            self.held -= size

    def _take(self, size: int, before: int = 0) -> None:
        """Counts ``size`` more bytes of a body of which ``before`` are counted already."""
        if before + size > self._most:
            raise BodyTooLarge(
                f"the body is over the {self._most} bytes that all bodies in flight may hold: shorten it, or raise "
                "router.max_inflight_bytes"
            )
        if size and self.held + size > self._most:
            raise Overloaded(
                f"bodies in flight hold {self.held} bytes of router.max_inflight_bytes; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.held += size


async def read_body(request: Request, limit: int) -> bytes:
    """Returns all bytes of a request's body.

    Raises BodyTooLarge for a declared or actual length over ``limit`` bytes, Cancelled if the client disconnects,
    InvalidRequest for a compressed body.
    """
    coding = request.headers.get("content-encoding", "identity").strip()
    if coding.lower() not in ("", "identity"):
        raise InvalidRequest(f"content-encoding is {coding[:32]!r}: send the body as it is", "content-encoding")
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
