"""gRPC with certificates: a channel to a role, a port that asks for certificates, and which role may call what.

Knows nothing of services' contents. Credentials of a port follow the files (a callback of gRPC's before every
handshake); a channel keeps those it was made with, so whoever reconnects makes a new one when ``generation`` moved.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from baton.protos.errors import Forbidden
from baton.protos.rpc import abort
from baton.tls.identity import Identity, TlsMaterial

log = logging.getLogger("baton.tls")

Options = Sequence[tuple[str, Any]]
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
    """Opens channels, with our certificate where there is one. ``generation`` moves when a new one is in force."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity

    @property
    def generation(self) -> int:
        """Returns the generation of the certificate that a channel made now would carry."""
        if self._identity is None:
            return 0
        self._identity.current()
        return self._identity.generation

    def channel(self, address: str, role: str = "worker", options: Options = ()) -> grpc.aio.Channel:
        """Returns a channel to ``address``, where the peer must carry the name of ``role``."""
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
    """Binds ``address``; the port. With an identity it speaks TLS, and asks for certificates if there is a CA."""
    if identity is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(identity))


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Returns a server's credentials, which follow the files."""
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
    """Returns ``calls`` with roles turned into names."""
    return {method: tuple(f"{role}.{domain}" for role in roles) for method, roles in calls.items()}


def handshake_failure(error: grpc.aio.AioRpcError) -> str:
    """Returns why a channel could not be secured, as gRPC tells it; "" when that is not what failed."""
    text = error.details() or ""
    if "andshake failed" not in text and "Peer name" not in text and "Verification Check failed" not in text:
        return ""
    return text.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")


class NameGuard(grpc.aio.ServerInterceptor):
    """Lets a call through if its caller's certificate carries a name that may make it. Methods not named are open
    to whoever the CA vouches for (health, reflection)."""

    def __init__(self, allowed: Allowed, where: str = "") -> None:
        self._allowed, self._where = allowed, where
        self._told: set[tuple[str, str]] = set()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler, behind a check where there is one for its method."""
        handler = await continuation(details)
        fitting = [prefix for prefix in self._allowed if details.method.startswith(prefix)]
        if handler is None or not fitting:
            return handler
        names = frozenset(self._allowed[max(fitting, key=len)])
        return _guarded(handler, lambda context: self._against(context, details.method, names))

    def _against(self, context: Any, method: str, names: frozenset[str]) -> Forbidden | None:
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


def peer_names(context: Any) -> frozenset[str]:
    """Returns the DNS names of the caller's certificate."""
    return frozenset(name.decode() for name in context.auth_context().get("peer_dns", ()))


def _guarded(handler: Any, against: Callable[[Any], Forbidden | None]) -> Any:
    """``handler``, whose calls end with what ``against`` says."""
    streams_in, codec = handler.request_streaming, (handler.request_deserializer, handler.response_serializer)
    if handler.response_streaming:
        stream = grpc.stream_stream_rpc_method_handler if streams_in else grpc.unary_stream_rpc_method_handler
        inner = handler.stream_stream if streams_in else handler.unary_stream
        return stream(_guarded_stream(inner, against), *codec)
    unary = grpc.stream_unary_rpc_method_handler if streams_in else grpc.unary_unary_rpc_method_handler
    inner = handler.stream_unary if streams_in else handler.unary_unary

    async def call(request: Any, context: Any) -> Any:
        if (error := against(context)) is not None:
            await abort(context, error)
        return await inner(request, context)

    return unary(call, *codec)


def _guarded_stream(inner: Any, against: Callable[[Any], Forbidden | None]) -> Any:
    """gRPC takes coroutines that write and generators that yield for different things: keep the kind."""

    async def write(request: Any, context: Any) -> None:
        if (error := against(context)) is not None:
            await abort(context, error)
        await inner(request, context)

    async def generate(request: Any, context: Any) -> Any:
        if (error := against(context)) is not None:
            await abort(context, error)
        async for item in inner(request, context):
            yield item

    return generate if inspect.isasyncgenfunction(inner) else write
