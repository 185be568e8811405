"""The router's two listeners in one process: REST (uvicorn) and gRPC, started together and stopped together.

Knows nothing of what dispatch does, nor who decides when to stop: the program's main handles signals.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc
import msgspec
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from baton.cluster.config import RouterConfig
from baton.cluster.hosts import LOOPBACK
from baton.protos.errors import ConfigError
from baton.protos.rpc import UNACCEPTED
from baton.protos.v1 import inference_pb2, inference_pb2_grpc, open_inference_pb2, open_inference_pb2_grpc
from baton.router.api.access import AccessInterceptor
from baton.router.api.app import make_app
from baton.router.api.grpc.service import InferenceService
from baton.router.api.open_inference.grpc import OpenInferenceService
from baton.router.api.surfaces import Surfaces
from baton.router.edge.acceptor import Acceptor
from baton.router.edge.connection_table import ConnectionEntry, ConnectionTable, EdgeLimits
from baton.router.edge.origins import LoopbackOnly, with_cors
from baton.router.edge.protocol import BoundedHttp
from baton.tls.identity import Identity
from baton.tls.rpc import NameGuard, add_port

Stop = Callable[[], Awaitable[None]]
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
OPEN_INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
BACKLOG = 2048  # connections that may wait to be accepted, so that a burst isn't refused by the kernel
LEAST_GRACE_S = 0.1  # in which idle connections close
CALM_EVERY_S = 0.005  # how often a router that ends looks whether its connections are closed
UNREAD_S = 300.0  # a client that takes nothing of its answer for so long is cut off by the kernel
GRPC_KEEPALIVE_MS = 20_000  # milliseconds of silence after which a client is asked; half of it to answer
GRPC_HANDSHAKE_MS = 10_000  # milliseconds that a handshake has, because a stranger may never end it
GRPC_IDLE_MS = 300_000  # without a call; a client connects again by itself
GRPC_METADATA_BYTES = 16 << 10  # bytes of a call's headers, because they are read before the caller is known
GRPC_STREAMS = 1024  # calls at once on one connection; more wait in the client
SPARE_FILES = 256  # descriptors for all but REST's connections: links to workers, Redis, files, gRPC


class RouterAddress(msgspec.Struct, frozen=True):
    """Says where the router listens; ports are the actual ones where the config said 0."""

    host: str
    port: int
    grpc_port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Returns the base URL of the REST API, without a slash at the end."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"


@asynccontextmanager
async def running_router(
    config: RouterConfig,
    surfaces: Surfaces,
    identity: Identity | None = None,
) -> AsyncIterator[RouterAddress]:
    """Runs both listeners while the block runs, with TLS if there is an ``identity``. Raises ConfigError for a port
    in use.

    At the block's end, running requests get ``shutdown_grace_s`` seconds; then they are cancelled.
    """
    surfaces.generation.catalog.preload()
    grpc_port, stop_grpc = await _start_grpc(config, surfaces, identity)
    try:
        app = make_app(surfaces)
        open_to_all = not surfaces.access.gate.closed and not (identity and identity.files.ca)
        app = for_pages(config, app, open_to_all)
        port, stop_rest = await _start_rest(config, app, identity)
    except BaseException:
        await stop_grpc()
        raise
    try:
        yield RouterAddress(config.host, port, grpc_port, "https" if identity else "http")
    finally:
        await asyncio.gather(stop_rest(), stop_grpc())
        surfaces.generation.metering.flush()


async def serve_router(
    config: RouterConfig,
    surfaces: Surfaces,
    stop: asyncio.Event,
    started: Callable[[RouterAddress], None] = lambda address: None,
    identity: Identity | None = None,
) -> None:
    """Runs both listeners until ``stop`` is set; calls ``started`` with the address once they accept.

    Raises as ``running_router``.
    """
    async with running_router(config, surfaces, identity) as address:
        started(address)
        await stop.wait()


async def _start_rest(config: RouterConfig, app: ASGIApp, identity: Identity | None) -> tuple[int, Stop]:
    listener = _bound(config.host, config.port, shared=config.processes > 1)
    server = _Uvicorn(
        edge_limits(config),
        identity.listener() if identity else None,
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=max(LEAST_GRACE_S, config.shutdown_grace_s),  # type: ignore[arg-type]
        ),
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.up(serving)

    async def stop() -> None:
        server.end()
        await serving

    return listener.getsockname()[1], stop


def edge_limits(config: RouterConfig) -> EdgeLimits:
    """Returns the limits of REST connections; their number is also limited by the process's open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = config.max_connections
    if soft != resource.RLIM_INFINITY:
        most = min(most, max(soft - SPARE_FILES, soft // 2))
    return EdgeLimits(
        config.max_header_bytes,
        config.max_headers,
        config.max_url_bytes,
        config.header_timeout_s,
        config.min_body_rate,
        config.keep_alive_s,
        most,
        config.max_connections_per_address,
    )


def for_pages(config: RouterConfig, app: ASGIApp, open_to_all: bool) -> ASGIApp:
    """Returns ``app`` with CORS, and with checks of Host and Origin if it is ``open_to_all`` on a loopback host."""
    if open_to_all and config.host in LOOPBACK:
        app = LoopbackOnly(app, config.allowed_hosts, config.cors_origins)
    return with_cors(app, config.cors_origins)


class _Uvicorn(uvicorn.Server):
    """Signals belong to the composition root, accepting to the edge; ``up`` returns once connections are taken."""

    def __init__(self, limits: EdgeLimits, context: ssl.SSLContext | None, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._connections, self._context = ConnectionTable(limits, time.monotonic), context
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Accept nothing more, and let ``serve`` return once what runs is over or out of time."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Renews the headers that tell the time, once a second until the end: uvicorn looks ten times a second."""
        seconds = 0
        while not await self.on_tick(10 * seconds):
            seconds += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes idle connections and waits for the others within the grace; uvicorn waits 0.1 s at least."""
        for closing in (*self.servers, *(sockets or ())):
            closing.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 (plain sets)
                    await asyncio.sleep(CALM_EVERY_S)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel("the router ends, and the grace is over")
        await self.lifespan.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on ``sockets``, each connection within the limits."""
        await self.lifespan.startup()

        def protocol(place: ConnectionEntry) -> BoundedHttp:
            made = BoundedHttp(self._connections, place, self.config, self.server_state, self.lifespan.state)
            place.connection = made
            return made

        self.servers = [Acceptor(s, self._connections, protocol, self._context) for s in sockets or ()]  # type: ignore[misc]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def up(self, serving: asyncio.Task[None]) -> None:
        while not self.started:
            if serving.done():
                await serving
                raise ConfigError("the REST listener ended while it started; the log says why", "router.port")
            await asyncio.sleep(CALM_EVERY_S)


class _Health(health.aio.HealthServicer):
    """Implements the health service with ``List``, which the library leaves out."""

    async def List(self, request: health_pb2.HealthListRequest, context: object) -> health_pb2.HealthListResponse:
        """Returns every service's status."""
        found = {k: health_pb2.HealthCheckResponse(status=v) for k, v in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=found)


async def _start_grpc(config: RouterConfig, surfaces: Surfaces, identity: Identity | None) -> tuple[int, Stop]:
    shared, most = config.processes > 1, edge_limits(config).max_connections
    options = _grpc_options(surfaces.generation.limits.max_body_bytes, shared, most)
    server = grpc.aio.server(options=options, interceptors=(*_guards(identity), AccessInterceptor(surfaces.access)))
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(surfaces.generation), server)
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
        OpenInferenceService(surfaces.generation), server
    )
    servicer = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (SERVICE, OPEN_INFERENCE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = _grpc_port(server, config.host, config.grpc_port, identity)
    await server.start()
    for name in ("", SERVICE, OPEN_INFERENCE):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop() -> None:
        await servicer.enter_graceful_shutdown()
        await server.stop(config.shutdown_grace_s)

    return port, stop


def _guards(identity: Identity | None) -> tuple[NameGuard, ...]:
    """Names that clients must carry, where some are named: REST looks at them in the handshake."""
    return (NameGuard({"/": identity.names}, "the router's gRPC port"),) if identity and identity.names else ()


def _grpc_options(max_message_bytes: int, shared: bool, max_connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", int(shared)),  # only when asked to: else a second router would share the port unseen
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", GRPC_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", GRPC_KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", GRPC_KEEPALIVE_MS // 4),
        ("grpc.server_handshake_timeout_ms", GRPC_HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", GRPC_IDLE_MS),
        ("grpc.max_metadata_size", GRPC_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", GRPC_METADATA_BYTES),
        ("grpc.max_concurrent_streams", GRPC_STREAMS),
        UNACCEPTED,
        ("grpc.max_allowed_incoming_connections", max_connections),
    ]


def _grpc_port(server: grpc.aio.Server, host: str, port: int, identity: Identity | None) -> int:
    try:
        bound = add_port(server, f"{_bracketed(host)}:{port}", identity)
    except RuntimeError:
        bound = 0
    if not bound:
        raise _port_error("gRPC", host, port, "grpc_port", "--grpc-port")
    return bound


def _bound(host: str, port: int, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        raise _port_error("REST", host, port, "port", "--port") from error
    # Accepted sockets inherit it. asyncio sets it only where proto is given: else 40 ms per answer (Nagle).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
    return listener


def _port_error(surface: str, host: str, port: int, key: str, flag: str) -> ConfigError:
    return ConfigError(
        f"the {surface} port {port} on {host} can't be had (in use?): choose another with {flag} or router.{key}",
        f"router.{key}",
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
