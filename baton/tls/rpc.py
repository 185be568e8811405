"""gRPC over TLS: channels to a role, ports that ask for certificates, and which role may call what.

Knows nothing of services' contents. A port's credentials follow the files (a callback of gRPC's before every
handshake); a channel keeps those it was made with, so its owner makes a new one once ``generation`` has changed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from baton.protos.errors import Forbidden
from baton.protos.rpc import abort
from baton.tls.identity import Identity, TlsMaterial

log = logging.getLogger("baton.tls")

Options = Sequence[tuple[str, str | int]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]
StreamHandler = Callable[..., Any]  # a coroutine that writes, or a generator that yields: gRPC takes either
Check = Callable[[grpc.aio.ServicerContext], Forbidden | None]
Allowed = Mapping[str, Sequence[str]]
"""Names that may call a method, by the beginning of its full name; the longest that fits counts."""

SHARED = ("router", "worker", "client")
WORKER_CALLS: Allowed = {
    "/baton.v1.Worker/": ("router", "client"),
    "/baton.v1.Worker/Describe": SHARED,
    "/baton.v1.Worker/Snapshot": SHARED,
    "/baton.v1.Worker/Fetch": ("worker",),
    "/baton.v1.PrefillWorker/": ("router",),
    "/baton.v1.DecodeWorker/": ("router",),
    "/baton.v1.DecodeWorker/Handoff": ("worker",),
}
"""Roles, not names yet: ``names_for`` turns them into names of a domain."""


class Dialer:
    """Opens gRPC channels, with this process's certificate if ``identity`` is given, else in plaintext."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity

    @property
    def generation(self) -> int:
        """Returns a number that rises with each renewed certificate; remake channels when it has changed.

        0 without TLS.
        """
        if self._identity is None:
            return 0
        self._identity.current()
        return self._identity.generation

    def channel(self, address: str, role: str = "worker", options: Options = ()) -> grpc.aio.Channel:
        """Returns a channel to ``address``, whose certificate must carry the name of ``role``."""
        if self._identity is None:
            return grpc.aio.insecure_channel(address, options=list(options))
        found = self._identity.current()
        name = self._identity.files.name_of(role)
        return grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(found.ca, found.key, found.cert),
            options=[*options, ("grpc.ssl_target_name_override", name)],
        )


PLAIN = Dialer()


def add_port(server: grpc.aio.Server, address: str, identity: Identity | None) -> int:
    """Binds the server to ``address``; returns the port.

    With ``identity`` it speaks TLS, and asks for client certificates if there is a CA.
    """
    if identity is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(identity))


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Returns a server's credentials, which change as the identity's files do."""
    given = identity.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        try:
            found = identity.current()
        except Exception:  # raised into gRPC's core it would end nothing and tell nobody
            log.exception("the certificate could not be looked at")
            return None
        if found is given:
            return None
        given = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(given), fetch, bool(given.ca))


def _configuration(found: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca or None)


def names_for(calls: Allowed, domain: str) -> Allowed:
    """Returns ``calls`` with each role replaced by its DNS name in ``domain``."""
    return {method: tuple(f"{role}.{domain}" for role in roles) for method, roles in calls.items()}


def handshake_failure(error: grpc.aio.AioRpcError) -> str:
    """Returns why the TLS handshake of a channel failed, as gRPC words it; "" if something else failed."""
    text = error.details() or ""
    if "andshake failed" not in text and "Peer name" not in text and "Verification Check failed" not in text:
        return ""
    return text.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")


class NameGuard(grpc.aio.ServerInterceptor):
    """Intercepts calls and refuses (Forbidden) those whose client certificate carries none of the names allowed for
    the method.

    Methods not in ``allowed`` are open to every certificate of the CA (health, reflection).
    """

    def __init__(self, allowed: Allowed, where: str = "") -> None:
        self._allowed, self._where = allowed, where
        self._told: set[tuple[str, str]] = set()

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Returns the handler, wrapped in a check of the caller's names if ``allowed`` has its method."""
        handler = await continuation(details)
        fitting = [prefix for prefix in self._allowed if details.method.startswith(prefix)]
        if handler is None or not fitting:
            return handler
        names = frozenset(self._allowed[max(fitting, key=len)])
        return _guarded(handler, lambda context: self._against(context, details.method, names))

    def _against(self, context: grpc.aio.ServicerContext, method: str, names: frozenset[str]) -> Forbidden | None:
        found = peer_names(context)
        if names & found:
            return None
        shown = ", ".join(sorted(found)) or "no name"
        if (shown, method) not in self._told:  # once: a peer may try again and again
            self._told.add((shown, method))
            log.warning(
                "TLS refused on %s: a certificate for %s may not call %s (from %s)",
                self._where,
                shown,
                method,
                context.peer(),
            )
        return Forbidden(
            f"a certificate for {shown} may not call {method}: it takes one for {' or '.join(sorted(names))}"
        )


def peer_names(context: grpc.aio.ServicerContext) -> frozenset[str]:
    """Returns the DNS names in the certificate of a gRPC call's caller."""
    return frozenset(name.decode() for name in context.auth_context().get("peer_dns", ()))


def _guarded(handler: grpc.RpcMethodHandler, against: Check) -> grpc.RpcMethodHandler:
    """``handler``, whose calls end with what ``against`` says."""
    streams_in, codec = handler.request_streaming, (handler.request_deserializer, handler.response_serializer)
    if handler.response_streaming:
        stream = grpc.stream_stream_rpc_method_handler if streams_in else grpc.unary_stream_rpc_method_handler
        inner = handler.stream_stream if streams_in else handler.unary_stream
        return stream(_guarded_stream(inner, against), *codec)
    unary = grpc.stream_unary_rpc_method_handler if streams_in else grpc.unary_unary_rpc_method_handler
    inner = handler.stream_unary if streams_in else handler.unary_unary

    async def call(request: object, context: grpc.aio.ServicerContext) -> object:
        if (error := against(context)) is not None:
            await abort(context, error)
        return await inner(request, context)

    return unary(call, *codec)


def _guarded_stream(inner: StreamHandler, against: Check) -> StreamHandler:
    """gRPC takes coroutines that write and generators that yield for different things: keep the kind."""

    async def write(request: object, context: grpc.aio.ServicerContext) -> None:
        if (error := against(context)) is not None:
            await abort(context, error)
        await inner(request, context)

    async def generate(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        if (error := against(context)) is not None:
            await abort(context, error)
        async for item in inner(request, context):
            yield item

    return generate if inspect.isasyncgenfunction(inner) else write
