"""The process on another host of a simulated worker's ranks, which sends and receives KV there: the product's
RankSender and RankReceiver, as ``worker.rank_sender`` joins them.

Knows nothing of engines.
"""

from __future__ import annotations

import os
from functools import partial

from baton.drill.machines.clock import MachineClock
from baton.drill.machines.network import Network
from baton.drill.machines.process import Process
from baton.drill.models.host_pages import PARTS
from baton.drill.rpc.client import SimulatedDialer
from baton.drill.rpc.server import Server
from baton.drill.scenario import FAR
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport.auto import AutoTransport
from baton.kv.transport.grpc import GrpcTransport, handoff_handler
from baton.kv.wire.describing import ask_worker
from baton.protos.channel import HostSender
from baton.protos.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from baton.worker.rank_receiver import RankReceiver
from baton.worker.rank_sender import RankSender


class SimulatedHost:
    """Another host of the ranks of worker ``slot`` in its life number ``number``; ``memory`` are its pages."""

    def __init__(self, slot: str, number: int, network: Network, clock: MachineClock, memory: PageMemory) -> None:
        self.process = Process(f"{slot}#{number}{FAR}", clock)
        self.address, token = f"{slot}:82{number:02}", f"{slot} {number}".encode()
        self.hosts = HostSender("", b"", PARTS[0]), HostSender(self.address, token, PARTS[1], f"{slot}{FAR}")
        self._network = network
        dialer = SimulatedDialer(network, self.process.name)
        self._sender = RankSender(os.dup(memory.fd), token, partial(_transport, dialer, clock), clock.now)
        self._receiver = RankReceiver(token, self._sender.pages, lambda accept: "nowhere")

    def start(self) -> None:
        """Serves the lead, and who sends KV here."""
        server, receiver = Server(self.process.spawn), self._receiver
        handlers = self._sender.handlers(), receiver.handlers(), handoff_handler(receiver.accept)
        server.add_generic_rpc_handlers(handlers)
        add_WorkerServicer_to_server(receiver, server)  # type: ignore[arg-type]
        self._network.listen(self.address, self.process.name, server)

    def kill(self) -> None:
        """Ends the process abruptly."""
        self._network.process_died(self.process.name)
        self.process.kill()

    def held(self) -> int:
        """Returns the number of leases and streams that it has for its lead."""
        return self._receiver.held()

    def close(self) -> None:
        """Frees what the process had of its pages."""
        self._sender.close()


def _transport(dialer: SimulatedDialer, clock: MachineClock, pages: PageMemory, name: str) -> AutoTransport:
    ask = partial(ask_worker, dialer=dialer)
    return AutoTransport(pages, clock.now, name, describe=ask, sender=lambda name, memory: GrpcTransport(dialer))
