"""The process that sends KV out of the pages of a host that has ranks of a worker, but not its lead; in the decode
role it receives KV into them (``rank_receiver.py``).

Knows nothing of ranks or steps. The worker's I/O process, on the lead's host, says by gRPC which pages hold which
finished blocks (``host_orders.py``). This process sends its part of them to the decode worker, by a transport of
its own choice. It ends with the session that started it, and that with the lead.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc
import grpc.aio
import msgspec

from baton.decode_worker.io.receiver_orders import SERVICE as RECEIVER
from baton.engine.backends.ranks.hosts.sender_process import PORT, TOKEN_BYTES, SenderSpec
from baton.engine.child import child_arguments
from baton.kv.layout.extents import require_part
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import tcp
from baton.kv.transport.auto import AutoTransport
from baton.kv.transport.grpc import handoff_handler, server_options
from baton.kv.wire.base import Accept
from baton.prefill_worker.io.handoff import Handoff, HandoffReport
from baton.prefill_worker.io.host_orders import (
    ORDERS,
    REACH,
    SERVICE,
    Answer,
    HostBegin,
    HostCommit,
    HostNotSent,
    HostReach,
    HostReached,
    HostSent,
    HostShip,
    encode,
)
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.process.security import identity_of
from baton.protos.errors import BatonError, Cancelled, ConfigError, Forbidden, to_info
from baton.protos.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from baton.tls.rpc import Allowed, NameGuard, add_port, names_for
from baton.worker.rank_receiver import RankReceiver, understood

log = logging.getLogger("baton.kv")

CALLS: Allowed = {
    f"/{SERVICE}/": ("worker",),
    f"/{RECEIVER}/": ("worker",),
    "/baton.v1.Worker/Describe": ("worker",),
    "/baton.v1.DecodeWorker/Handoff": ("worker",),
}
MOST_PART = 64 << 20  # bytes of a host's part of a page that may come by gRPC
BEGIN_S = 10.0  # seconds that whoever opens a stream has to say what is sent


class RankSender:
    """Sends parts of the pages in the memory file ``fd`` for whoever has ``token``.

    ``make(pages, name)`` makes its transports; ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        fd: int,
        token: bytes,
        make: Callable[[PageMemory, str], AutoTransport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fd, self._token, self._make, self._clock = fd, token, make, clock
        self._memory: PageMemory | None = None
        self._transports: dict[str, AutoTransport] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC handlers of the service."""
        calls = {
            "Send": grpc.stream_stream_rpc_method_handler(self.send),
            "Reach": grpc.unary_unary_rpc_method_handler(self.reach),
        }
        return grpc.method_handlers_generic_handler(SERVICE, calls)

    async def send(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Sends one handoff's part, as the orders in ``requests`` say, and yields how it ended."""
        yield encode(await self._sent(requests))

    async def reach(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answers whether this host can ship KV to a receiver, which it measures if it doesn't know."""
        try:
            asked = understood(REACH, request)
            if not hmac.compare_digest(asked.token, self._token):
                raise Forbidden("only the lead of this host's ranks may have their KV sent")
            await self._transport(asked).meet(asked.address, asked.incarnation)
        except BatonError as error:
            return encode(HostReached(error.message or error.label))
        return encode(HostReached())

    async def _sent(self, requests: AsyncIterator[bytes]) -> Answer:
        try:
            handoff = self._handoff(await self._begun(requests))
            report = await self._run(handoff, requests)
        except BatonError as error:
            return HostNotSent(to_info(error))
        return HostSent(report)

    async def _begun(self, requests: AsyncIterator[bytes]) -> HostBegin:
        """Returns the first order. Raises Forbidden unless it comes in time, from the lead."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                async for said in requests:
                    begin = understood(ORDERS, said)
                    if isinstance(begin, HostBegin) and hmac.compare_digest(begin.token, self._token):
                        return begin
                    break
        raise Forbidden("only the lead of this host's ranks may have their KV sent")

    async def _run(self, handoff: Handoff, requests: AsyncIterator[bytes]) -> HandoffReport:
        """Returns the handoff's report; whoever stops it ends it at once."""
        running = asyncio.ensure_future(handoff.run())
        hearing = asyncio.ensure_future(_hear(handoff, requests))
        try:
            await asyncio.wait({running, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                wrong = None if hearing.cancelled() else hearing.exception()
                raise wrong if isinstance(wrong, BatonError) else Cancelled("the lead has stopped this handoff")
            return await running
        finally:
            for task in (running, hearing):
                task.cancel()
            await asyncio.shield(asyncio.gather(running, hearing, return_exceptions=True))

    def _handoff(self, begin: HostBegin) -> Handoff:
        memory, transport = self.pages(begin.pages, begin.page_bytes), self._transport(begin)
        require_part(begin.part, memory.page_bytes)
        transport.expect(begin.to.address, begin.incarnation)
        wire = WirePlan(begin.sender.layout, part=begin.part, shard=begin.shard, receivers=begin.receivers)

        async def plan() -> WirePlan:
            return wire

        return Handoff(transport, memory, begin.sender, begin.to, self._clock, plan=plan)

    def pages(self, pages: int, page_bytes: int) -> PageMemory:
        """Returns the host's pages, mapped when they are first asked for. Raises ConfigError for others."""
        if self._memory is None:
            self._memory = PageMemory(self._fd, pages, page_bytes)
        if (self._memory.pages, self._memory.page_bytes) != (pages, page_bytes):
            raise ConfigError("the lead's pages have changed: start its worker again", "pages")
        return self._memory

    def close(self) -> None:
        """Lets the host's pages go."""
        if self._memory is None:
            os.close(self._fd)
        else:
            self._memory.close()

    def _transport(self, begin: HostBegin | HostReach) -> AutoTransport:
        if begin.kv_transport not in self._transports:
            pages = self.pages(begin.pages, begin.page_bytes)
            self._transports[begin.kv_transport] = self._make(pages, begin.kv_transport)
        return self._transports[begin.kv_transport]


async def _hear(handoff: Handoff, requests: AsyncIterator[bytes]) -> None:
    """Passes orders on until one stops the handoff, or the lead is gone; after the commit it waits for that."""
    async for said in requests:
        order = understood(ORDERS, said)
        if isinstance(order, HostShip):
            handoff.ship(order.blocks)
        elif isinstance(order, HostCommit):
            handoff.commit(order.closing.first, order.closing.cached_tokens)
        else:
            return


async def serve(spec: SenderSpec, token: bytes, fd: int, lead: socket.socket) -> None:
    """Serves for ever whoever has ``token``, and tells ``lead`` the port."""
    identity = identity_of(spec.tls, "the port of a host's KV sender")
    guards = [] if identity is None else [NameGuard(names_for(CALLS, identity.files.domain))]
    server = grpc.aio.server(options=server_options(MOST_PART), interceptors=guards)
    sender = RankSender(
        fd, token, lambda pages, name: AutoTransport(pages, time.monotonic, name, identity=identity)
    )

    def listen(accept: Accept) -> str:
        return tcp.listen(spec.here, accept, 0, identity)[1]

    receiver = RankReceiver(token, sender.pages, listen)
    server.add_generic_rpc_handlers((sender.handlers(), receiver.handlers(), handoff_handler(receiver.accept)))
    add_WorkerServicer_to_server(receiver, server)
    host = f"[{spec.here}]" if ":" in spec.here else spec.here
    port = add_port(server, f"{host}:0", identity)
    await server.start()
    lead.sendall(port.to_bytes(PORT, "little"))
    await server.wait_for_termination()


def main() -> int:
    """Runs the process; returns its exit status."""
    arguments = child_arguments("baton.worker.rank_sender", "SenderSpec")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spec = msgspec.json.decode(arguments.spec, type=SenderSpec)
    lead = socket.socket(fileno=arguments.fd)
    token, fds, _, _ = socket.recv_fds(lead, TOKEN_BYTES, 1)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(spec, token, fds[0], lead))
    return 0


if __name__ == "__main__":
    sys.exit(main())
