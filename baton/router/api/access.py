"""The outermost layer of the REST and gRPC surfaces: identifies the caller and gives each call an id, kept in
CALLER.

Knows nothing of endpoints or keys: the gate identifies callers and refuses them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.protos.errors import BatonError
from baton.router.access.caller import CALLER, NOBODY, with_call
from baton.router.access.headers import clean_request_id
from baton.router.api.anthropic.errors import is_messages_path
from baton.router.api.error_wording import error_at
from baton.router.api.grpc.bodies import with_counted_bodies
from baton.router.api.grpc.decoding import with_decode_errors
from baton.router.api.grpc.errors import grpc_errors
from baton.router.api.surfaces import AccessDependencies

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version"})
OPEN_FILES = "/dashboard"  # a page without any data
OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")
REQUEST_ID = "x-request-id"
MESSAGES_ID = "request-id"  # where Anthropic's clients look for it
KEY_HEADER = "x-api-key"  # where Anthropic's clients put the key


class AccessMiddleware:
    """ASGI middleware: identifies callers, limits bodies in flight, and sets ``x-request-id`` on every response.

    That id is the caller's own if well formed, else this router's; ``explain`` finds a request by either.
    """

    def __init__(self, app: ASGIApp, access: AccessDependencies) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application for an identified caller; answers others with the error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, own_id = Headers(scope=scope), self._access.environment.new_id()
        asked_id = clean_request_id(headers.get(REQUEST_ID))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                for name in (REQUEST_ID, *[MESSAGES_ID] * is_messages_path(scope["path"])):
                    told[name] = asked_id or own_id
            await send(message)

        try:
            identify, authorization = self._access.gate.identify, authorization_of(headers)
            caller = NOBODY if is_open(scope["path"]) else identify(authorization)
            CALLER.set(with_call(caller, own_id, asked_id, headers.get))
        except BatonError as error:
            self._access.metrics.refused.labels(error.label).inc()
            await error_at(scope["path"], error)(scope, receive, send_with_id)
            return
        with self._access.bodies.counting(receive) as counted:
            await self._app(scope, counted, send_with_id)


def authorization_of(headers: Headers) -> str | None:
    """Returns the Authorization header's value, or one made of the key in KEY_HEADER, or None."""
    key = headers.get(KEY_HEADER)
    return headers.get("authorization") or (f"Bearer {key}" if key else None)


def is_open(path: str) -> bool:
    """Returns whether ``path`` needs no API key (health, metrics, version, the dashboard's files and ``/``)."""
    return path in OPEN_PATHS or path == OPEN_FILES or path.startswith(f"{OPEN_FILES}/")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """gRPC interceptor that identifies callers by metadata (``authorization``, ``x-request-id``, ``x-slo-…``) and
    limits messages in flight.

    Health and reflection need no key.
    """

    def __init__(self, access: AccessDependencies) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Sets CALLER and returns the handler, or returns a handler that ends the call with the error."""
        if details.method.startswith(OPEN_SERVICES):
            return with_decode_errors(await continuation(details))
        metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        try:
            caller = self._access.gate.identify(metadata.get("authorization"))
            asked_id = clean_request_id(metadata.get(REQUEST_ID))
            CALLER.set(with_call(caller, self._access.environment.new_id(), asked_id, metadata.get))
        except BatonError as error:
            self._access.metrics.refused.labels(error.label).inc()
            return with_decode_errors(_refusing(await continuation(details), error))
        return with_decode_errors(with_counted_bodies(await continuation(details), self._access.bodies))


def _refusing(handler: grpc.RpcMethodHandler | None, error: BatonError) -> grpc.RpcMethodHandler | None:
    """A handler of the same kind that raises ``error``."""
    if handler is None:
        return None

    async def refuse(request: object, context: grpc.aio.ServicerContext) -> None:
        async with grpc_errors(context):
            raise error

    async def refuse_stream(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        async with grpc_errors(context):
            raise error
        yield  # the handler's kind: it yields nothing

    streams_in, codec = handler.request_streaming, (handler.request_deserializer, handler.response_serializer)
    if handler.response_streaming:
        stream = grpc.stream_stream_rpc_method_handler if streams_in else grpc.unary_stream_rpc_method_handler
        return stream(refuse_stream, *codec)
    unary = grpc.stream_unary_rpc_method_handler if streams_in else grpc.unary_unary_rpc_method_handler
    return unary(refuse, *codec)
